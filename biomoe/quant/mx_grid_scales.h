// Where the scales of a BlockGrid of MX blocks lie for Blackwell's products, for the host and the device.
#pragma once

#include <cstdint>

#include "biomoe/quant/block_grid.h"
#include "biomoe/quant/mx_scale_layout.h"

namespace biomoe {

// Of blocks of 1x32 they are laid out as those of the matrix, of blocks of 32x1 as those of the transposed
// matrix. Groups of equal size, which are experts' weights, have a layout each, one after the other; groups
// of rows by offsets, which are then multiples of MxScaleLayout::kTileRows, share one.
class MxGridScales {
 public:
  explicit constexpr MxGridScales(const BlockGrid& grid)
      : by_column_(grid.block.columns == 1),
        group_rows_(grid.group_rows > 0 ? grid.group_rows : grid.rows),
        groups_(grid.group_rows > 0 ? grid.groups : 1),
        layout_(by_column_ ? MxScaleLayout::of(grid.columns, group_rows_)
                           : MxScaleLayout::of(group_rows_, grid.columns)) {}

  constexpr int64_t bytes() const { return groups_ * layout_.bytes(); }
  // Of the block that begins at `row`, in column `block_column` of blocks.
  constexpr int64_t offset(int64_t row, int64_t block_column) const {
    const int64_t group = row / group_rows_, own_row = row % group_rows_;
    return group * layout_.bytes() + (by_column_
                                          ? layout_.offset(block_column, own_row / MxScaleLayout::kBlock)
                                          : layout_.offset(own_row, block_column));
  }

 private:
  bool by_column_ = false;
  int64_t group_rows_ = 0;
  int64_t groups_ = 0;
  MxScaleLayout layout_;
};

}  // namespace biomoe
