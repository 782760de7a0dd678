#include "biomoe/quant/mx_scale_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <tuple>
#include <vector>

namespace biomoe {
namespace {

static_assert(MxScaleLayout{}.bytes() == 0);
static_assert(MxScaleLayout{1, 1}.bytes() == 512);
static_assert(MxScaleLayout::of(128, 128).blocks == 4 && MxScaleLayout::of(128, 129).blocks == 5);

// The order of bytes spelled out: within a tile, 32 lines of 16 bytes; line i holds rows i, i + 32, i + 64
// and i + 96, four blocks of each. -1, -1: padding.
std::vector<std::pair<int64_t, int64_t>> in_order(int64_t rows, int64_t blocks) {
  std::vector<std::pair<int64_t, int64_t>> order;
  for (int64_t first_row = 0; first_row < rows; first_row += 128) {
    for (int64_t first_block = 0; first_block < blocks; first_block += 4) {
      for (int64_t line = 0; line < 32; ++line) {
        for (int64_t quarter = 0; quarter < 4; ++quarter) {
          for (int64_t column = 0; column < 4; ++column) {
            const int64_t row = first_row + 32 * quarter + line, block = first_block + column;
            const bool inside = row < rows && block < blocks;
            order.emplace_back(inside ? row : -1, inside ? block : -1);
          }
        }
      }
    }
  }
  return order;
}

class MxScaleLayoutTest : public testing::TestWithParam<std::tuple<int64_t, int64_t>> {};

TEST_P(MxScaleLayoutTest, IsTheOrderOfTilesLinesAndQuarters) {
  const auto [rows, blocks] = GetParam();
  const MxScaleLayout layout{rows, blocks};
  const auto order = in_order(rows, blocks);
  ASSERT_EQ(layout.bytes(), static_cast<int64_t>(order.size()));
  for (int64_t at = 0; at < layout.bytes(); ++at) {
    const auto& [row, block] = order[static_cast<size_t>(at)];
    if (row < 0) continue;
    ASSERT_EQ(layout.offset(row, block), at) << "row " << row << ", block " << block;
  }
}

TEST_P(MxScaleLayoutTest, PaddedExtentsFillItOnce) {
  const auto [rows, blocks] = GetParam();
  const MxScaleLayout layout{rows, blocks};
  std::set<int64_t> seen;
  for (int64_t row = 0; row < layout.row_tiles() * 128; ++row) {
    for (int64_t block = 0; block < layout.block_tiles() * 4; ++block) seen.insert(layout.offset(row, block));
  }
  EXPECT_EQ(static_cast<int64_t>(seen.size()), layout.bytes());
  if (!seen.empty()) {
    EXPECT_EQ(*seen.begin(), 0);
    EXPECT_EQ(*seen.rbegin(), layout.bytes() - 1);
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, MxScaleLayoutTest,
                         testing::Combine(testing::Values<int64_t>(0, 1, 31, 128, 129, 257, 384),
                                          testing::Values<int64_t>(0, 1, 3, 4, 5, 11, 16)));

// The scales of rows [begin, begin + rows) are those of a matrix of their own, at the offset of its first.
TEST(MxScaleLayout, SegmentsOfRowsArePartsOfIt) {
  const MxScaleLayout all{640, 7};
  for (const auto& [begin, rows] :
       std::vector<std::pair<int64_t, int64_t>>{{0, 128}, {128, 384}, {512, 128}}) {
    const MxScaleLayout own{rows, 7};
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t block = 0; block < 7; ++block) {
        ASSERT_EQ(all.offset(begin + row, block), all.offset(begin, 0) + own.offset(row, block));
      }
    }
  }
}

// Along the rows of a weight gradient's operands segments are ranges of blocks, with the stride of the whole.
TEST(MxScaleLayout, SegmentsOfBlocksKeepTheStrideOfTheWhole) {
  const MxScaleLayout all{300, 20}, own{300, 8};
  for (int64_t row = 0; row < 300; ++row) {
    for (int64_t block = 0; block < 8; ++block) {
      const int64_t tile = row / 128, inside = own.offset(row, block) - tile * own.row_tile_stride();
      ASSERT_EQ(all.offset(row, 12 + block), all.offset(0, 12) + tile * all.row_tile_stride() + inside);
    }
  }
}

}  // namespace
}  // namespace biomoe
