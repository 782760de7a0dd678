// Where the E8M0 scales of an MX matrix lie for Blackwell's block-scaled products, for the host and the
// device: the layout that tcgen05.mma takes scale factors in (PTX ISA, "Scale factor layout"; CUTLASS has it
// as Sm1xxBlockScaledConfig; cuBLAS as its 1D block scaling factors layout).
#pragma once

#include <cstdint>

namespace biomoe {

// Of a matrix of rows that are cut into blocks of kBlock columns, one scale of a byte each. Scales lie in
// tiles of 128 rows x 4 blocks, tiles of one row of tiles beside each other, and both extents are padded to
// whole tiles with zeros. Rows from a multiple of 128 on are a range of their own, so the scales of an
// expert's segment of rows are part of those of all rows.
struct MxScaleLayout {
  static constexpr int64_t kBlock = 32;
  static constexpr int64_t kTileRows = 128;
  static constexpr int64_t kTileBlocks = 4;
  static constexpr int64_t kTileBytes = kTileRows * kTileBlocks;

  int64_t rows = 0;
  int64_t blocks = 0;

  // For a matrix of so many columns; the last block may be cut short.
  static constexpr MxScaleLayout of(int64_t rows, int64_t columns) {
    return {rows, (columns + kBlock - 1) / kBlock};
  }

  constexpr int64_t row_tiles() const { return (rows + kTileRows - 1) / kTileRows; }
  constexpr int64_t block_tiles() const { return (blocks + kTileBlocks - 1) / kTileBlocks; }
  // From a tile to the one below it.
  constexpr int64_t row_tile_stride() const { return block_tiles() * kTileBytes; }
  constexpr int64_t bytes() const { return row_tiles() * row_tile_stride(); }
  // Of the scale of block `block` of row `row`; both may lie in the padding.
  constexpr int64_t offset(int64_t row, int64_t block) const {
    return row / kTileRows * row_tile_stride() + block / kTileBlocks * kTileBytes + row % 32 * 16 +
           row % kTileRows / 32 * kTileBlocks + block % kTileBlocks;
  }
};

}  // namespace biomoe
