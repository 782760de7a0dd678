#include "biomoe/ops/adamw.h"

#include <array>

#include "tests/ops/op_test.h"
#include "tests/ref/adamw.h"

namespace biomoe::test {
namespace {

// Segments of odd lengths with gaps between them, one of them empty, one cut over several threads and blocks.
const std::vector<ArenaSegment> kSegments = {{1, 7, true},    {8, 0, true},      {9, 1, false},
                                             {13, 16, false}, {40, 70003, true}, {70100, 16385, false}};
constexpr int64_t kElements = 90001;

constexpr ref::AdamwRule kRule{.lr = 3e-2, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-6, .weight_decay = 0.1};

// The numbers of update `step`, which is made.
Tensor<double> update_values(int64_t step, double beta1 = kRule.beta1, double beta2 = kRule.beta2,
                             double grad_scale = 1.0) {
  Tensor<double> update(Shape{kNumUpdateValues});
  update.at(kLr) = kRule.lr;
  update.at(kCorrection1) = 1.0 - std::pow(beta1, static_cast<double>(step));
  update.at(kCorrection2) = 1.0 - std::pow(beta2, static_cast<double>(step));
  update.at(kGradScale) = grad_scale;
  update.at(kApply) = 1.0;
  return update;
}

AdamwArgs arguments(Tensor<float>& param, Tensor<float>& grad, Tensor<float>& exp_avg,
                    Tensor<float>& exp_avg_sq, Tensor<double>& update) {
  return {.weights_A = param.view(),
          .grad_A = grad.view(),
          .exp_avg_A = exp_avg.view(),
          .exp_avg_sq_A = exp_avg_sq.view(),
          .segments = kSegments,
          .beta1 = kRule.beta1,
          .beta2 = kRule.beta2,
          .eps = kRule.eps,
          .weight_decay = kRule.weight_decay,
          .update_5 = update.view()};
}

TEST(AdamwTest, FollowsTheReferenceOverStepsInItsSegmentsOnly) {
  constexpr double kGradScale = 0.5;
  Tensor<float> first(Shape{kElements});
  for (int threads : {1, 2}) {
    TestContext ctx(threads);
    Tensor<float> param(Shape{kElements}), grad = param, exp_avg = param, exp_avg_sq = param;
    const Tensor<float> poison = param;
    std::vector<ref::AdamwState> want(static_cast<size_t>(kElements));
    const Rng rng(7, RngStream::kTest);
    for (const ArenaSegment& segment : kSegments) {
      for (int64_t i = segment.begin; i < segment.begin + segment.count; ++i) {
        param.at(i) = static_cast<float>(rng.normal(static_cast<uint64_t>(i)));
        exp_avg.at(i) = exp_avg_sq.at(i) = 0.0f;
        want[static_cast<size_t>(i)].param = static_cast<double>(param.at(i));
      }
    }
    for (int64_t step = 1; step <= 4; ++step) {
      grad.fill_normal(static_cast<uint64_t>(100 + step));
      Tensor<double> update = update_values(step, kRule.beta1, kRule.beta2, kGradScale);
      adamw(*ctx, arguments(param, grad, exp_avg, exp_avg_sq, update));
      for (const ArenaSegment& segment : kSegments) {
        for (int64_t i = segment.begin; i < segment.begin + segment.count; ++i) {
          ref::AdamwRule rule = kRule;
          if (!segment.decay) rule.weight_decay = 0.0;
          auto& state = want[static_cast<size_t>(i)];
          state = ref::adamw(state, kGradScale * static_cast<double>(grad.at(i)), rule, step);
        }
      }
    }
    Tensor<float> outside = poison;
    std::vector<double> got_param, want_param, got_avg, want_avg, got_sq, want_sq;
    for (const ArenaSegment& segment : kSegments) {
      for (int64_t i = segment.begin; i < segment.begin + segment.count; ++i) {
        got_param.push_back(static_cast<double>(param.at(i)));
        got_avg.push_back(static_cast<double>(exp_avg.at(i)));
        got_sq.push_back(static_cast<double>(exp_avg_sq.at(i)));
        want_param.push_back(want[static_cast<size_t>(i)].param);
        want_avg.push_back(want[static_cast<size_t>(i)].exp_avg);
        want_sq.push_back(want[static_cast<size_t>(i)].exp_avg_sq);
        outside.at(i) = param.at(i);
      }
    }
    EXPECT_CLOSE(got_param, want_param, DType::kF32);
    EXPECT_CLOSE(got_avg, want_avg, DType::kF32);
    EXPECT_CLOSE(got_sq, want_sq, DType::kF32);
    EXPECT_TRUE(outside.same_bits(param)) << "elements between segments stay poisoned";
    if (threads == 1) first = param;
    EXPECT_TRUE(param.same_bits(first));
  }
}

TEST(AdamwTest, CodesAreWrittenOnAGpuOnly) {
  TestContext ctx(1);
  constexpr int64_t kWeights = 128 * 128;
  Tensor<float> param(Shape{kWeights}), grad = param, exp_avg = param, exp_avg_sq = param,
                                        scales(Shape{2, 1});
  std::vector<uint8_t> codes(kWeights);
  Tensor<double> update = update_values(1);
  const std::vector<ArenaSegment> segments = {{0, kWeights, true}};
  const std::vector<WeightCodes> none(1),
      one = {{.codes_EOI = TensorView(codes.data(), DType::kU8, Shape{1, 128, 128}),
              .scales_NB = scales.view()}};
  for (Tensor<float>* tensor : {&param, &grad, &exp_avg, &exp_avg_sq}) tensor->fill(1);
  AdamwArgs args = arguments(param, grad, exp_avg, exp_avg_sq, update);
  args.segments = segments;
  args.codes = none;
  adamw(*ctx, args);
  EXPECT_NE(param.at(0), 1.0f);
  args.codes = one;
  EXPECT_THROW(adamw(*ctx, args), Error);
}

TEST(AdamwTest, LateStepsHaveNoBiasCorrectionAndZeroGradientsOnlyDecay) {
  TestContext ctx(1);
  Tensor<float> param(Shape{kElements}), grad = param, exp_avg = param, exp_avg_sq = param;
  param.fill(2);
  grad.fill(0);
  exp_avg.fill(0);
  exp_avg_sq.fill(0);
  Tensor<double> update = update_values(int64_t{1} << 40);
  AdamwArgs args = arguments(param, grad, exp_avg, exp_avg_sq, update);
  adamw(*ctx, args);
  EXPECT_EQ(param.at(1), static_cast<float>(2.0 - kRule.lr * kRule.weight_decay * 2.0));
  EXPECT_EQ(param.at(13), 2.0f);
  grad.fill(1);
  args.beta1 = args.beta2 = 0.0;
  args.eps = 0.0;
  update = update_values(1, 0.0, 0.0);
  args.update_5 = update.view();
  adamw(*ctx, args);
  EXPECT_FLOAT_EQ(param.at(13), static_cast<float>(2.0 - kRule.lr));
}

TEST(AdamwTest, LeavesEverythingWhereTheUpdateIsNotToBeMade) {
  TestContext ctx(1);
  Tensor<float> param(Shape{kElements});
  param.fill_normal(1);
  Tensor<float> grad = param, exp_avg = param, exp_avg_sq = param;
  const Tensor<float> before = param;
  Tensor<double> update = update_values(1);
  update.at(kApply) = 0;
  grad.fill(std::nanf(""));
  adamw(*ctx, arguments(param, grad, exp_avg, exp_avg_sq, update));
  EXPECT_TRUE(param.same_bits(before) && exp_avg.same_bits(before) && exp_avg_sq.same_bits(before));
}

TEST(ClipFactorTest, FollowsTheNormAndRefusesWhatIsNotFinite) {
  TestContext ctx(1);
  Tensor<double> sums(Shape{2}), loss(Shape{3}), out(Shape{3});
  const auto run = [&](double a, double b, double max_norm) {
    sums.set({a, b});
    clip_factor(*ctx, {.sums_S = sums.view(),
                       .loss_sums_3 = loss.view(),
                       .max_norm = max_norm,
                       .norm_1 = out.view().rows(0, 1),
                       .factor_1 = out.view().rows(1, 1),
                       .apply_1 = out.view().rows(2, 1)});
    return out.elements();
  };
  loss.fill(1);
  EXPECT_EQ(run(9, 16, 0), (std::vector<double>{5, 1, 1}));
  EXPECT_EQ(run(9, 16, 10), (std::vector<double>{5, 1, 1}));
  EXPECT_EQ(run(9, 16, 1), (std::vector<double>{5, 1 / (5 + 1e-6), 1}));
  EXPECT_EQ(run(0, 0, 1), (std::vector<double>{0, 1, 1}));
  EXPECT_EQ(run(INFINITY, 0, 1)[2], 0);
  EXPECT_EQ(run(NAN, 0, 1)[2], 0);
  loss.at(1) = NAN;
  EXPECT_EQ(run(9, 16, 1)[2], 0);
}

TEST(AdamwTest, RefusesBadBetasAndSegmentsOutsideTheArena) {
  TestContext ctx(1);
  Tensor<float> param(Shape{kElements}), other(Shape{kElements - 1});
  Tensor<double> update = update_values(1);
  const AdamwArgs good = arguments(param, param, param, param, update);
  AdamwArgs args = good;
  args.beta2 = 1.0;
  EXPECT_THROW(adamw(*ctx, args), Error);
  args = good;
  args.grad_A = other.view();
  EXPECT_THROW(adamw(*ctx, args), Error);
  for (const ArenaSegment& bad :
       {ArenaSegment{-1, 1, true}, ArenaSegment{0, kElements + 1, true}, ArenaSegment{kElements, 1, true},
        ArenaSegment{1, std::numeric_limits<int64_t>::max(), true}, ArenaSegment{0, -1, true}}) {
    args = good;
    const std::array<ArenaSegment, 1> segments = {bad};
    args.segments = segments;
    EXPECT_THROW(adamw(*ctx, args), Error);
  }
}

TEST(SumSquaresTest, IsTheSameForAnyNumberOfThreads) {
  Tensor<float> x(Shape{kElements});
  x.fill_normal(1, 100.0);
  std::vector<double> want;
  for (const ArenaSegment& segment : kSegments) {
    long double sum = 0.0L;
    for (int64_t i = segment.begin; i < segment.begin + segment.count; ++i) {
      sum += static_cast<long double>(x.at(i)) * static_cast<long double>(x.at(i));
    }
    want.push_back(static_cast<double>(sum));
  }
  Tensor<double> first(Shape{static_cast<int64_t>(kSegments.size())});
  for (int threads : {1, 2, 5}) {
    TestContext ctx(threads);
    Tensor<double> sums(Shape{static_cast<int64_t>(kSegments.size())});
    sum_squares(*ctx, {.x_A = x.view(), .segments = kSegments, .sums_S = sums.view()});
    for (size_t i = 0; i < want.size(); ++i) {
      EXPECT_NEAR(sums.at(static_cast<int64_t>(i)), want[i], want[i] * tolerance(DType::kF64));
    }
    if (threads == 1) first = sums;
    EXPECT_TRUE(sums.same_bits(first));
  }
}

TEST(SumSquaresTest, AddsPartialSumsWhereThereAreSome) {
  TestContext ctx(2);
  Tensor<float> x(Shape{kElements}), partials(Shape{3});
  x.fill(1);
  partials.at(0) = 0.5f;
  partials.at(1) = 2.0f;
  partials.at(2) = 4.0f;
  std::vector<TensorView> views(kSegments.size());
  views[0] = partials.view();
  Tensor<double> sums(Shape{static_cast<int64_t>(kSegments.size())});
  sum_squares(*ctx, {.x_A = x.view(), .segments = kSegments, .sums_S = sums.view(), .partials = views});
  EXPECT_EQ(sums.at(0), 6.5);
  EXPECT_EQ(sums.at(5), 16385.0);
  views.pop_back();
  EXPECT_THROW(
      sum_squares(*ctx, {.x_A = x.view(), .segments = kSegments, .sums_S = sums.view(), .partials = views}),
      Error);
}

TEST(SumSquaresTest, KeepsNanAndInfinityAndTheLargestFloats) {
  TestContext ctx(2);
  Tensor<float> x(Shape{kElements});
  x.fill(1).at(40 + 50000) = std::nanf("");
  x.at(28) = -INFINITY;
  x.at(9) = std::numeric_limits<float>::max();
  Tensor<double> sums(Shape{static_cast<int64_t>(kSegments.size())});
  sum_squares(*ctx, {.x_A = x.view(), .segments = kSegments, .sums_S = sums.view()});
  EXPECT_EQ(sums.at(0), 7.0);
  EXPECT_EQ(sums.at(1), 0.0);
  EXPECT_NEAR(std::sqrt(sums.at(2)), static_cast<double>(std::numeric_limits<float>::max()), 1e24);
  EXPECT_EQ(sums.at(3), std::numeric_limits<double>::infinity());
  EXPECT_TRUE(std::isnan(sums.at(4)));
  EXPECT_EQ(sums.at(5), 16385.0);
}

}  // namespace
}  // namespace biomoe::test
