#include "biomoe/ops/rope.h"

#include "tests/ops/op_test.h"
#include "tests/ref/rope.h"

namespace biomoe::test {
namespace {

struct Tables {
  Tensor<float> cos, sin;
  Tables(double theta, int64_t positions, int64_t head_dim)
      : cos(Shape{positions, head_dim / 2}), sin(Shape{positions, head_dim / 2}) {
    fill_rope_tables(theta, head_dim, cos.view(), sin.view());
  }
};

class RopeTest : public testing::TestWithParam<ref::RopeShape> {};

TEST_P(RopeTest, RotatesTheFirstHeadsInPlaceAndBack) {
  const ref::RopeShape shape = GetParam();
  constexpr int64_t kPositions = 16;  // small angles: their rounding to fp32 stays below the tolerance
  Tables tables(10000.0, kPositions, shape.head_dim);
  Tensor<int32_t> positions(Shape{shape.tokens});
  positions.fill_ids(1, kPositions);
  Tensor<float> x(Shape{shape.tokens, shape.row_width}, 3);
  x.fill_normal(2);
  for (int threads : {1, 2}) {
    for (bool inverse : {false, true}) {
      TestContext ctx(threads);
      Tensor<float> y = x;
      RopeArgs args{.x_TC = y.view(),
                    .positions_T = positions.view(),
                    .cos_SK2 = tables.cos.view(),
                    .sin_SK2 = tables.sin.view(),
                    .num_heads = shape.num_heads,
                    .head_dim = shape.head_dim,
                    .inverse = inverse};
      rope(*ctx, args);
      EXPECT_CLOSE(y.values(), ref::rope(x.values(), positions.elements(), 10000.0, shape, inverse),
                   DType::kF32);
      EXPECT_TRUE(y.padding_untouched());
      args.inverse = !inverse;
      rope(*ctx, args);
      EXPECT_CLOSE(y.values(), x.values(), DType::kF32);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, RopeTest,
                         testing::Values(ref::RopeShape{0, 8, 1, 8}, ref::RopeShape{1, 2, 1, 2},
                                         ref::RopeShape{5, 50, 3, 10}, ref::RopeShape{200, 130, 2, 64},
                                         ref::RopeShape{33, 24, 0, 8}, ref::RopeShape{3, 66, 1, 66}));

TEST(RopeTableTest, HoldsTheCosineOfAnglesRoundedToSinglePrecision) {
  constexpr int64_t kHeadDim = 64, kPositions = 5000;
  Tables tables(1e6, kPositions, kHeadDim);
  for (int64_t i = 0; i < kHeadDim / 2; ++i) {
    // Rounding each step as single-precision arithmetic does, from a double of each.
    const auto exponent = static_cast<float>(static_cast<double>(2 * i) / kHeadDim);
    const auto power = static_cast<float>(std::pow(1e6, static_cast<double>(exponent)));
    const auto frequency = static_cast<float>(1.0 / static_cast<double>(power));
    for (int64_t position : {0, 1, 2, 1023, 4999}) {
      const auto angle = static_cast<float>(static_cast<double>(position) * static_cast<double>(frequency));
      EXPECT_EQ(tables.cos.at(position, i), static_cast<float>(std::cos(static_cast<double>(angle))));
      EXPECT_EQ(tables.sin.at(position, i), static_cast<float>(std::sin(static_cast<double>(angle))));
    }
  }
  EXPECT_TRUE(tables.cos.padding_untouched() && tables.sin.padding_untouched());
}

TEST(RopeTest, RefusesPositionsOutsideTheTablesAndHeadsThatDoNotFit) {
  TestContext ctx(1);
  Tables tables(10000.0, 4, 8);
  Tensor<int32_t> positions(Shape{2});
  Tensor<float> x(Shape{2, 16});
  x.fill(1);
  RopeArgs args{.x_TC = x.view(),
                .positions_T = positions.view(),
                .cos_SK2 = tables.cos.view(),
                .sin_SK2 = tables.sin.view(),
                .num_heads = 2,
                .head_dim = 8};
  for (int32_t bad : {-1, 4}) {
    positions.fill(0).at(1) = bad;
    EXPECT_THROW(rope(*ctx, args), Error);
  }
  positions.fill(3);
  args.num_heads = 3;
  EXPECT_THROW(rope(*ctx, args), Error);
  args.num_heads = 1;
  args.head_dim = 7;
  EXPECT_THROW(rope(*ctx, args), Error);
}

TEST(RopeReferenceTest, InverseIsTheGradient) {
  const ref::RopeShape shape{3, 10, 2, 4};
  const std::vector<int32_t> positions = {0, 3, 7};
  Tensor<double> x(Shape{3, 10}), dy(Shape{3, 10});
  x.fill_normal(1);
  dy.fill_normal(2);
  const auto loss = [&](const ref::Vector& v) {
    return ref::dot(ref::rope(v, positions, 100.0, shape), dy.values());
  };
  EXPECT_LE(ref::gradient_error(loss, x.values(), ref::rope(dy.values(), positions, 100.0, shape, true)),
            ref::kGradientTolerance);
}

}  // namespace
}  // namespace biomoe::test
