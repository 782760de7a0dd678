#include "biomoe/ops/rms_norm.h"

#include "tests/ops/op_test.h"
#include "tests/ref/rms_norm.h"

namespace biomoe::test {
namespace {

constexpr double kEps = 1e-5;

// Where a row has one element the gradient is the difference of two equal terms but for eps: only a large eps
// leaves digits to compare.
struct Sizes {
  int64_t tokens, width;
  double eps = kEps;
};

class RmsNormTest : public testing::TestWithParam<Sizes> {};

TEST_P(RmsNormTest, ForwardMatchesReference) {
  const auto [tokens, width, eps] = GetParam();
  const Shape shape{tokens, width};
  Tensor<float> x(shape, 3), residual(shape, 1), weight(Shape{width});
  x.fill_normal(1, 2.0);
  residual.fill_normal(2);
  weight.fill_normal(3);
  const auto added = sum_of(x.values(), residual.values());
  const auto plain = ref::rms_norm(x.values(), weight.values(), eps);
  const auto with_residual = ref::rms_norm(added, weight.values(), eps);
  Tensor<float> first_y(shape);
  for (int threads : {1, 2}) {
    TestContext ctx(threads);
    Tensor<float> y(shape, 2), rstd(Shape{tokens});
    rms_norm_forward(*ctx, {.x_TD = x.view(),
                            .residual_TD = {},
                            .weight_D = weight.view(),
                            .sum_TD = {},
                            .y_TD = y.view(),
                            .rstd_T = rstd.view(),
                            .eps = eps});
    EXPECT_CLOSE(y.values(), plain.y, DType::kF32);
    EXPECT_CLOSE(rstd.values(), plain.rstd, DType::kF32);
    EXPECT_TRUE(y.padding_untouched());
    Tensor<float> sum(shape, 4), y_sum(shape);
    rms_norm_forward(*ctx, {.x_TD = x.view(),
                            .residual_TD = residual.view(),
                            .weight_D = weight.view(),
                            .sum_TD = sum.view(),
                            .y_TD = y_sum.view(),
                            .rstd_T = rstd.view(),
                            .eps = eps});
    EXPECT_CLOSE(sum.values(), added, DType::kF32);
    EXPECT_CLOSE(y_sum.values(), with_residual.y, DType::kF32);
    if (threads == 1) first_y = y_sum;
    EXPECT_TRUE(y_sum.same_bits(first_y)) << threads << " threads";
    EXPECT_CLOSE(rstd.values(), with_residual.rstd, DType::kF32);
    Tensor<float> in_place = residual, y_in_place(shape);
    rms_norm_forward(*ctx, {.x_TD = x.view(),
                            .residual_TD = in_place.view(),
                            .weight_D = weight.view(),
                            .sum_TD = in_place.view(),
                            .y_TD = y_in_place.view(),
                            .rstd_T = rstd.view(),
                            .eps = eps});
    EXPECT_EQ(in_place.values(), sum.values());
    EXPECT_TRUE(y_in_place.same_bits(y_sum));
  }
}

TEST_P(RmsNormTest, BackwardMatchesReferenceForAnyNumberOfThreads) {
  const auto [tokens, width, eps] = GetParam();
  const Shape shape{tokens, width};
  Tensor<float> dy(shape, 1), sum(shape, 3), weight(Shape{width}), dresidual(shape, 2), rstd(Shape{tokens});
  dy.fill_normal(1);
  sum.fill_normal(2);
  weight.fill_normal(3);
  dresidual.fill_normal(4);
  rstd.set(ref::rms_norm(sum.values(), weight.values(), eps).rstd);
  Tensor<float> start(Shape{width});
  start.fill_normal(5);
  const auto want = ref::rms_norm_backward(dy.values(), sum.values(), weight.values(), eps);
  const auto want_dx = sum_of(want.dsum, dresidual.values());
  const auto want_dweight = sum_of(want.dweight, start.values());
  Tensor<float> first(Shape{width}), first_dx(shape, 3);
  for (int threads : {1, 2, 3}) {
    TestContext ctx(threads, rms_norm_backward_scratch_bytes(Device::kCpu, tokens, width));
    Tensor<float> dx(shape, 3), dweight = start, in_place = dresidual;
    RmsNormBackwardArgs args{.dy_TD = dy.view(),
                             .sum_TD = sum.view(),
                             .weight_D = weight.view(),
                             .rstd_T = rstd.view(),
                             .dresidual_TD = {},
                             .dx_TD = dx.view(),
                             .dweight_D = dweight.view(),
                             .accumulate = true};
    rms_norm_backward(*ctx, args);
    EXPECT_CLOSE(dx.values(), want.dsum, DType::kF32);
    EXPECT_CLOSE(dweight.values(), want_dweight, DType::kF32);
    EXPECT_TRUE(dx.padding_untouched() && dweight.padding_untouched());
    if (threads == 1) {
      first = dweight;
      first_dx = dx;
    }
    EXPECT_TRUE(dweight.same_bits(first) && dx.same_bits(first_dx)) << threads << " threads";
    args.accumulate = false;
    dweight.fill(std::nanf(""));
    rms_norm_backward(*ctx, args);
    EXPECT_CLOSE(dweight.values(), want.dweight, DType::kF32);
    args.dresidual_TD = args.dx_TD = in_place.view();
    rms_norm_backward(*ctx, args);
    EXPECT_CLOSE(in_place.values(), want_dx, DType::kF32);
    EXPECT_EQ((*ctx).scratch->used(), 0u);
  }
}

// 31, 32 and 33 rows: around one block of the weight gradient; 8192 and more: blocks of more rows.
INSTANTIATE_TEST_SUITE_P(Sizes, RmsNormTest,
                         testing::Values(Sizes{0, 8}, Sizes{1, 1, 0.5}, Sizes{31, 15}, Sizes{32, 16},
                                         Sizes{33, 17}, Sizes{200, 257}, Sizes{8191, 4}, Sizes{8192, 4},
                                         Sizes{8193, 3}));

TEST(RmsNormTest, CopiesTheInputToSumWithoutAResidual) {
  TestContext ctx(1);
  Tensor<float> x(Shape{3, 5}), weight(Shape{5}), sum(Shape{3, 5}, 1), y(Shape{3, 5}), rstd(Shape{3});
  x.fill_normal(1);
  weight.fill(1);
  rms_norm_forward(*ctx, {.x_TD = x.view(),
                          .residual_TD = {},
                          .weight_D = weight.view(),
                          .sum_TD = sum.view(),
                          .y_TD = y.view(),
                          .rstd_T = rstd.view()});
  EXPECT_EQ(sum.values(), x.values());
}

TEST(RmsNormTest, ZeroRowsGiveZerosAndNanStaysInItsRow) {
  TestContext ctx(1);
  Tensor<float> x(Shape{3, 9}), weight(Shape{9}), y(Shape{3, 9}), rstd(Shape{3});
  x.fill(0).at(1, 4) = std::nanf("");
  weight.fill(1);
  rms_norm_forward(*ctx, {.x_TD = x.view(),
                          .residual_TD = {},
                          .weight_D = weight.view(),
                          .sum_TD = {},
                          .y_TD = y.view(),
                          .rstd_T = rstd.view()});
  for (int64_t i = 0; i < 9; ++i) {
    EXPECT_EQ(y.at(0, i), 0.0f);
    EXPECT_TRUE(std::isnan(y.at(1, i)));
    EXPECT_EQ(y.at(2, i), 0.0f);
  }
}

TEST(RmsNormTest, RefusesWrongShapesAndMissingSum) {
  TestContext ctx(1);
  Tensor<float> x(Shape{3, 4}), weight(Shape{5}), good(Shape{4}), y(Shape{3, 4}), rstd(Shape{3});
  RmsNormForwardArgs args{.x_TD = x.view(),
                          .residual_TD = {},
                          .weight_D = weight.view(),
                          .sum_TD = {},
                          .y_TD = y.view(),
                          .rstd_T = rstd.view()};
  EXPECT_THROW(rms_norm_forward(*ctx, args), Error);
  args.weight_D = good.view();
  args.residual_TD = x.view();
  EXPECT_THROW(rms_norm_forward(*ctx, args), Error);
}

TEST(RmsNormReferenceTest, GradientIsThatOfFiniteDifferences) {
  Tensor<double> sum(Shape{3, 5}), weight(Shape{5}), dy(Shape{3, 5});
  sum.fill_normal(1);
  weight.fill_normal(2);
  dy.fill_normal(3);
  const auto got = ref::rms_norm_backward(dy.values(), sum.values(), weight.values(), kEps);
  const auto of_sum = [&](const ref::Vector& s) {
    return ref::dot(ref::rms_norm(s, weight.values(), kEps).y, dy.values());
  };
  const auto of_weight = [&](const ref::Vector& w) {
    return ref::dot(ref::rms_norm(sum.values(), w, kEps).y, dy.values());
  };
  EXPECT_LE(ref::gradient_error(of_sum, sum.values(), got.dsum), ref::kGradientTolerance);
  EXPECT_LE(ref::gradient_error(of_weight, weight.values(), got.dweight), ref::kGradientTolerance);
}

}  // namespace
}  // namespace biomoe::test
