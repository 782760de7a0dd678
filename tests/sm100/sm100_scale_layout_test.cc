// Scales lie where CUTLASS's kernels read them. Needs CUTLASS's headers and no GPU.
#include "biomoe/backend/cuda/gemm/sm100_scale_layout.cuh"

#include <gtest/gtest.h>

#include <tuple>

namespace biomoe::cuda::sm100 {
namespace {

class Sm100ScaleLayoutTest : public testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(Sm100ScaleLayoutTest, IsThatOfBothOperands) {
  const auto [rows, columns] = GetParam();
  const MxScaleLayout ours = MxScaleLayout::of(rows, columns);
  const auto a = ScaleConfig::tile_atom_to_shape_SFA(cute::make_shape(rows, 64, columns, 1));
  const auto b = ScaleConfig::tile_atom_to_shape_SFB(cute::make_shape(64, rows, columns, 1));
  ASSERT_EQ(ours.bytes(), cute::cosize(a));
  ASSERT_EQ(ours.bytes(), cute::cosize(b));
  for (int row = 0; row < rows; ++row) {
    for (int column = 0; column < columns; ++column) {
      const int64_t want = ours.offset(row, column / MxScaleLayout::kBlock);
      ASSERT_EQ(a(row, column, 0), want) << row << ", " << column;
      ASSERT_EQ(b(row, column, 0), want) << row << ", " << column;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, Sm100ScaleLayoutTest,
                         testing::Combine(testing::Values(1, 100, 128, 300, 513),
                                          testing::Values(32, 96, 128, 992, 1024)));

TEST(Sm100ScaleLayout, OfASegmentOfRows) {
  const MxScaleLayout whole = MxScaleLayout::of(640, 288);
  const auto part = scale_layout(256, 288, whole.row_tile_stride());
  for (int row = 0; row < 256; ++row) {
    for (int column = 0; column < 288; ++column) {
      ASSERT_EQ(whole.offset(128, 0) + part(row, column, 0), whole.offset(128 + row, column / 32));
    }
  }
}

TEST(Sm100ScaleLayout, OfASegmentOfTheSums) {
  const MxScaleLayout whole = MxScaleLayout::of(300, 896);  // 896 rows of tokens: segments at 128 and 384
  const auto part = scale_layout(300, 256, whole.row_tile_stride());
  for (int row = 0; row < 300; ++row) {
    for (int column = 0; column < 256; ++column) {
      ASSERT_EQ(whole.offset(0, 128 / 32) + part(row, column, 0), whole.offset(row, (128 + column) / 32));
    }
  }
}

}  // namespace
}  // namespace biomoe::cuda::sm100
