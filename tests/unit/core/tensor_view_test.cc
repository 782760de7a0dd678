#include "biomoe/core/tensor_view.h"

#include <gtest/gtest.h>

#include <limits>
#include <numeric>
#include <vector>

namespace biomoe {
namespace {

TEST(Shape, CountsAndText) {
  EXPECT_EQ(Shape().num_elements(), 1);
  EXPECT_EQ(Shape({2, 3, 4}).num_elements(), 24);
  EXPECT_EQ(Shape({2, 0, 4}).num_elements(), 0);
  EXPECT_EQ(Shape({2, 3}).str(), "[2, 3]");
  EXPECT_EQ(Shape().str(), "[]");
  EXPECT_EQ(Shape({2, 3}), Shape({2, 3}));
  EXPECT_FALSE(Shape({2, 3}) == Shape({3, 2}));
  EXPECT_FALSE(Shape({2}) == Shape({2, 0}));
}

TEST(Shape, CountsBeyond32Bits) {
  EXPECT_EQ(Shape({int64_t{1} << 33, 3}).num_elements(), 3 * (int64_t{1} << 33));
  EXPECT_THROW(Shape({int64_t{1} << 40, int64_t{1} << 40}).num_elements(), Error);
  EXPECT_EQ(Shape({int64_t{1} << 62, 1}).num_elements(), int64_t{1} << 62);
}

TEST(Shape, RefusesWhatIsNoShape) {
  EXPECT_THROW(Shape({-1}), Error);
  EXPECT_THROW(Shape({1, 2, 3, 4, 5}), Error);
  EXPECT_THROW(Shape({1})[1], Error);
  EXPECT_THROW(Shape({1})[-1], Error);
}

struct Matrix : ::testing::Test {
  Matrix() : data(12) { std::iota(data.begin(), data.end(), 0.0f); }
  std::vector<float> data;
};

TEST_F(Matrix, RowsAndColumnsAreWindows) {
  const TensorView view(data.data(), DType::kF32, {3, 4});
  EXPECT_TRUE(view.contiguous());
  EXPECT_EQ(view.bytes(), 48u);
  const TensorView rows = view.rows(1, 2);
  EXPECT_EQ(rows.shape, Shape({2, 4}));
  EXPECT_EQ(rows.f32()[0], 4.0f);
  const TensorView columns = view.columns(1, 2);
  EXPECT_EQ(columns.shape, Shape({3, 2}));
  EXPECT_FALSE(columns.contiguous());
  EXPECT_EQ(columns.f32()[2 * columns.row_stride + 1], 10.0f);
  const TensorView corner = columns.rows(2, 1).columns(1, 1);
  EXPECT_EQ(corner.f32()[0], 10.0f);
  EXPECT_EQ(view.rows(3, 0).num_elements(), 0);
}

TEST_F(Matrix, WindowsOutsideAreRefused) {
  const TensorView view(data.data(), DType::kF32, {3, 4});
  EXPECT_THROW(view.rows(2, 2), Error);
  EXPECT_THROW(view.rows(-1, 1), Error);
  EXPECT_THROW(view.rows(0, -1), Error);
  EXPECT_THROW(view.columns(3, 2), Error);
  EXPECT_THROW(view.columns(-1, 1), Error);
  EXPECT_THROW(TensorView(data.data(), DType::kF32, {12}).columns(0, 1), Error);
  EXPECT_THROW(TensorView(data.data(), DType::kF32, {3, 4}, 3), Error) << "a row stride below the row";
}

TEST_F(Matrix, RowsOfHigherRanksKeepTheirAxes) {
  const TensorView view(data.data(), DType::kF32, {3, 2, 2});
  EXPECT_EQ(view.row_stride, 4);
  EXPECT_EQ(view.rows(1, 1).shape, Shape({1, 2, 2}));
  EXPECT_EQ(view.rows(1, 1).f32()[3], 7.0f);
}

TEST_F(Matrix, ReadingAsAnotherTypeIsRefused) {
  const TensorView view(data.data(), DType::kF32, {12});
  EXPECT_THROW(view.i32(), Error);
  EXPECT_THROW(view.f64(), Error);
  EXPECT_EQ(view.f32(), data.data());
  EXPECT_FALSE(TensorView());
  EXPECT_TRUE(view);
}

}  // namespace
}  // namespace biomoe
