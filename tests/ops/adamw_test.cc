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

AdamwArgs arguments(Tensor<float>& param, Tensor<float>& grad, Tensor<float>& exp_avg,
                    Tensor<float>& exp_avg_sq) {
  return {.param_A = param.view(),
          .grad_A = grad.view(),
          .exp_avg_A = exp_avg.view(),
          .exp_avg_sq_A = exp_avg_sq.view(),
          .segments = kSegments,
          .lr = kRule.lr,
          .beta1 = kRule.beta1,
          .beta2 = kRule.beta2,
          .eps = kRule.eps,
          .weight_decay = kRule.weight_decay};
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
      AdamwArgs args = arguments(param, grad, exp_avg, exp_avg_sq);
      args.grad_scale = kGradScale;
      args.step = step;
      adamw(*ctx, args);
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

TEST(AdamwTest, LateStepsHaveNoBiasCorrectionAndZeroGradientsOnlyDecay) {
  TestContext ctx(1);
  Tensor<float> param(Shape{kElements}), grad = param, exp_avg = param, exp_avg_sq = param;
  param.fill(2);
  grad.fill(0);
  exp_avg.fill(0);
  exp_avg_sq.fill(0);
  AdamwArgs args = arguments(param, grad, exp_avg, exp_avg_sq);
  args.step = int64_t{1} << 40;
  adamw(*ctx, args);
  EXPECT_EQ(param.at(1), static_cast<float>(2.0 - kRule.lr * kRule.weight_decay * 2.0));
  EXPECT_EQ(param.at(13), 2.0f);
  grad.fill(1);
  args.beta1 = args.beta2 = 0.0;
  args.eps = 0.0;
  adamw(*ctx, args);
  EXPECT_FLOAT_EQ(param.at(13), static_cast<float>(2.0 - kRule.lr));
}

TEST(AdamwTest, RefusesStepZeroBadBetasAndSegmentsOutsideTheArena) {
  TestContext ctx(1);
  Tensor<float> param(Shape{kElements}), other(Shape{kElements - 1});
  const AdamwArgs good = arguments(param, param, param, param);
  AdamwArgs args = good;
  args.step = 0;
  EXPECT_THROW(adamw(*ctx, args), Error);
  args = good;
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
