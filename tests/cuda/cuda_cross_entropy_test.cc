#include "biomoe/ops/cross_entropy.h"
#include "tests/cuda/gpu_test.h"
#include "tests/ref/cross_entropy.h"

namespace biomoe::test {
namespace {

struct Sizes {
  int64_t tokens, vocabulary, padding;
};

// One vector a row; vectors of a warp and one more; rows held in registers, and the first that is not.
const std::vector<Sizes> kSizes = {{0, 16, 0},    {1, 1, 0},     {40, 16, 0},  {40, 17, 0},
                                   {9, 8, 8},     {5, 1024, 0},  {5, 1032, 0}, {3, 32000, 0},
                                   {3, 32768, 0}, {3, 32776, 0}, {2, 33001, 1}};

using CudaCrossEntropyTest = GpuTest;

TEST_F(CudaCrossEntropyTest, MatchesReferenceAndNeverReadsIgnoredRows) {
  constexpr double kScale = 0.7;
  for (const DType dtype : kComputeTypes) {
    for (const auto& [tokens, vocabulary, padding] : kSizes) {
      SCOPED_TRACE(fmt::format("{} {} x {}", dtype_name(dtype), tokens, vocabulary));
      GpuTensor logits(ctx(), dtype, Shape{tokens, vocabulary}, padding),
          target(ctx(), DType::kI32, Shape{tokens});
      GpuTensor weight(ctx(), DType::kF32, Shape{tokens}), nll(ctx(), DType::kF32, Shape{tokens});
      GpuTensor scale(ctx(), DType::kF64, Shape{1});
      scale.fill(kScale);
      auto values = normals(1, logits.size(), dtype, 3.0);
      auto targets = ids(2, tokens, vocabulary);
      auto weights = normals(3, tokens, DType::kF32);
      for (size_t t = 0; t < targets.size(); t += 3) {
        if (t % 2) {
          weights[t] = 0.0;
        } else {
          targets[t] = -100;
        }
        std::fill_n(values.begin() + static_cast<int64_t>(t) * vocabulary, vocabulary, std::nan(""));
      }
      logits.set(values);
      target.set(doubles(targets));
      weight.set(weights);
      auto want = ref::cross_entropy(values, targets, weights, static_cast<size_t>(vocabulary));
      for (double& gradient : want.dlogits) gradient *= kScale;
      CrossEntropyArgs args{.logits_TV = logits.view(),
                            .targets_T = target.view(),
                            .weights_T = weight.view(),
                            .nll_T = nll.view(),
                            .grad_scale_1 = scale.view()};
      cross_entropy(ctx(), args);
      EXPECT_CLOSE(nll.values(), want.nll, DType::kF32);
      nll.fill(-1);
      args.write_gradient = true;
      cross_entropy(ctx(), args);
      EXPECT_CLOSE(nll.values(), want.nll, DType::kF32);
      EXPECT_CLOSE(logits.values(), want.dlogits, dtype);
      EXPECT_TRUE(logits.padding_untouched() && nll.padding_untouched());
    }
  }
}

TEST_F(CudaCrossEntropyTest, KeepsLargeLogitsAndShowsNanAndInfinity) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  for (const int64_t width : {16, 15}) {  // by vectors, and one by one
    GpuTensor logits(ctx(), DType::kF32, Shape{5, width}), target(ctx(), DType::kI32, Shape{5});
    GpuTensor weight(ctx(), DType::kF32, Shape{5}), nll(ctx(), DType::kF32, Shape{5});
    std::vector<double> values(static_cast<size_t>(5 * width), 0.0);
    const auto row = [&](int64_t t) { return values.begin() + t * width; };
    std::fill_n(row(0), width, 3e38);
    row(1)[3] = std::nan("");
    row(2)[3] = kInf;
    std::fill_n(row(3), width, -kInf);
    std::fill_n(row(4), width, -kInf);
    row(4)[0] = 2.0;
    logits.set(values);
    target.fill(0);
    weight.fill(1);
    cross_entropy(ctx(), {.logits_TV = logits.view(),
                          .targets_T = target.view(),
                          .weights_T = weight.view(),
                          .nll_T = nll.view(),
                          .grad_scale_1 = {}});
    const auto got = nll.values();
    EXPECT_NEAR(got[0], std::log(static_cast<double>(width)), 1e-5);
    for (size_t t = 1; t < 4; ++t) EXPECT_TRUE(std::isnan(got[t])) << t;
    EXPECT_EQ(got[4], 0.0);
  }
}

TEST_F(CudaCrossEntropyTest, LossSumsAddTheRowsThatCount) {
  for (const int64_t tokens : {0, 1, 1023, 1024, 1025, 5000}) {
    GpuTensor nll(ctx(), DType::kF32, Shape{tokens}), weight(ctx(), DType::kF32, Shape{tokens});
    GpuTensor sums(ctx(), DType::kF64, Shape{3});
    auto values = normals(1, tokens, DType::kF32), weights = normals(2, tokens, DType::kF32);
    std::vector<double> want = {1, 2, 3};
    for (size_t t = 0; t < values.size(); ++t) {
      if (t % 5 == 0) {
        weights[t] = 0.0;
        values[t] = std::nan("");
        continue;
      }
      want[0] += weights[t] * values[t];
      want[1] += values[t];
      want[2] += 1.0;
    }
    nll.set(values);
    weight.set(weights);
    sums.set({1, 2, 3});
    loss_sums(ctx(), {.nll_T = nll.view(), .weights_T = weight.view(), .sums_3 = sums.view()});
    EXPECT_CLOSE(sums.values(), want, DType::kF64);
  }
}

}  // namespace
}  // namespace biomoe::test
