#include "biomoe/ops/gemm.h"

#include "tests/ops/op_test.h"
#include "tests/ref/gemm.h"

namespace biomoe::test {
namespace {

struct Case {
  ref::GemmSizes sizes;
  bool transpose_a = false;
  bool transpose_b = false;
};

Shape operand(int64_t rows, int64_t columns, bool transpose) {
  return transpose ? Shape{columns, rows} : Shape{rows, columns};
}

class GemmTest : public testing::TestWithParam<ref::GemmSizes> {
 protected:
  // Every combination of transpositions.
  template <typename Check>
  void for_each_case(const Check& check) {
    for (bool transpose_a : {false, true}) {
      for (bool transpose_b : {false, true}) check(Case{GetParam(), transpose_a, transpose_b});
    }
  }
};

TEST_P(GemmTest, AssignsOverAnythingAndAccumulatesForAnyNumberOfThreads) {
  for_each_case([](const Case& gemm_case) {
    const auto [rows, columns, inner] = gemm_case.sizes;
    Tensor<float> a(operand(rows, inner, gemm_case.transpose_a), 3);
    Tensor<float> b(operand(inner, columns, gemm_case.transpose_b), 5);
    Tensor<float> start(Shape{rows, columns}, 2);
    const double scale = 1.0 / std::sqrt(static_cast<double>(std::max<int64_t>(1, inner)));
    a.fill_normal(1);
    b.fill_normal(2, scale);
    start.fill_normal(3);
    const auto want =
        ref::gemm(gemm_case.sizes, a.values(), gemm_case.transpose_a, b.values(), gemm_case.transpose_b);
    Tensor<float> first(Shape{rows, columns}, 2);
    for (int threads : {1, 2, 3}) {
      TestContext ctx(threads);
      Tensor<float> assigned(Shape{rows, columns}, 2), accumulated = start;
      GemmArgs args{.a = a.view(),
                    .b = b.view(),
                    .c = assigned.view(),
                    .transpose_a = gemm_case.transpose_a,
                    .transpose_b = gemm_case.transpose_b};
      gemm(*ctx, args);
      EXPECT_CLOSE(assigned.values(), want, DType::kF32);
      EXPECT_TRUE(assigned.padding_untouched());
      args.c = accumulated.view();
      args.accumulate = true;
      gemm(*ctx, args);
      EXPECT_CLOSE(accumulated.values(), sum_of(want, start.values()), DType::kF32);
      EXPECT_TRUE(accumulated.padding_untouched());
      if (threads == 1) first = assigned;
      EXPECT_TRUE(assigned.same_bits(first)) << threads << " threads";
    }
  });
}

// 128: the least side of a tile; 384 x 256: the largest; 256: the depth of a block.
INSTANTIATE_TEST_SUITE_P(Sizes, GemmTest,
                         testing::Values(ref::GemmSizes{0, 5, 7}, ref::GemmSizes{5, 0, 7},
                                         ref::GemmSizes{5, 7, 0}, ref::GemmSizes{0, 0, 0},
                                         ref::GemmSizes{1, 1, 1}, ref::GemmSizes{3, 1, 17},
                                         ref::GemmSizes{1, 65, 33}, ref::GemmSizes{63, 64, 65},
                                         ref::GemmSizes{255, 16, 129}, ref::GemmSizes{257, 130, 300},
                                         ref::GemmSizes{64, 513, 256}, ref::GemmSizes{127, 511, 128},
                                         ref::GemmSizes{512, 257, 130}, ref::GemmSizes{8, 256, 1000}));

TEST(GemmTest, NanReachesOnlyItsRowAndColumn) {
  TestContext ctx(2);
  Tensor<float> a(Shape{4, 8}), b(Shape{8, 5}), c(Shape{4, 5});
  a.fill_normal(1).at(2, 3) = std::nanf("");
  b.fill_normal(2);
  gemm(*ctx, {.a = a.view(), .b = b.view(), .c = c.view()});
  for (int64_t row = 0; row < 4; ++row) {
    for (int64_t column = 0; column < 5; ++column) EXPECT_EQ(std::isnan(c.at(row, column)), row == 2);
  }
}

// So a loop over experts and one grouped product agree, and a batch gives a row what the row gives alone.
TEST(GemmTest, ARowIsTheSameAloneAndAmongOthers) {
  TestContext ctx(2);
  Tensor<float> a(Shape{275, 530}), b(Shape{530, 37}), c(Shape{275, 37}), alone(Shape{275, 37});
  a.fill_normal(1);
  b.fill_normal(2);
  gemm(*ctx, {.a = a.view(), .b = b.view(), .c = c.view()});
  for (int64_t row = 0; row < 275; ++row) {
    gemm(*ctx, {.a = a.view().rows(row, 1), .b = b.view(), .c = alone.view().rows(row, 1)});
  }
  EXPECT_TRUE(alone.same_bits(c));
}

TEST(GemmTest, RefusesShapesThatDoNotFit) {
  TestContext ctx(1);
  Tensor<float> a(Shape{4, 8}), b(Shape{7, 5}), good_b(Shape{8, 5}), c(Shape{4, 5}), bad_c(Shape{5, 4});
  Tensor<double> wide(Shape{4, 8});
  EXPECT_THROW(gemm(*ctx, {.a = a.view(), .b = b.view(), .c = c.view()}), Error);
  EXPECT_THROW(gemm(*ctx, {.a = a.view(), .b = good_b.view(), .c = bad_c.view()}), Error);
  EXPECT_THROW(gemm(*ctx, {.a = wide.view(), .b = good_b.view(), .c = c.view()}), Error);
  EXPECT_THROW(gemm(*ctx, {.a = a.view(), .b = good_b.view(), .c = {}}), Error);
}

}  // namespace
}  // namespace biomoe::test
