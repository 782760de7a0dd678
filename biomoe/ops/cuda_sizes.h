// Sizes of the GPU's kernels that determine the scratch memory they take: here, since memory is also planned
// where there is no GPU.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "biomoe/core/arena.h"

namespace biomoe::cuda {

// Widths of heads that attention takes: multiples, and the widest of any of its ways.
inline constexpr int64_t kHeadWidthStep = 16;
inline constexpr int64_t kWidestHead = 256;
inline constexpr int64_t kWidestTrainedElsewhere = 128;  // than on Hopper, or in portable kernels

// What the products of experts want: rows of an expert padded to a tile, and gate and up columns in turns of
// so many, which one thread of a product's epilogue then holds both of.
inline constexpr int64_t kExpertRowAlignment = 128;
inline constexpr int64_t kGateUpInterleave = 32;

// Products of codes: rows and columns of weights, and columns of rows, that share a scale; widths are
// multiples of it.
inline constexpr int64_t kScaleBlock = 128;

// Codes by column have so many rows, or a multiple.
inline constexpr int64_t kCodeRowAlignment = 16;

// A weight gradient's product sums the squares of so many rows and columns at a time. Rows are counted in
// whole tiles.
inline constexpr int64_t kSquaresRows = 16;
inline constexpr int64_t kSquaresColumns = 256;

// Of whatever product runs: words that the products of experts leave zero, then what cuBLASLt wants on
// Hopper, which also holds the split tiles of up to 255 multiprocessors.
inline constexpr size_t kProductTicketBytes = 4096;
inline constexpr size_t kProductWorkspaceBytes = kProductTicketBytes + (size_t{32} << 20);

// Rows of partial sums of dweight in rms_norm_backward: four blocks a multiprocessor of the largest Hopper.
inline constexpr int64_t kRmsNormPartials = 528;

// Tokens of a block of the router: 16, or more where that would make more than 1024 blocks.
constexpr int64_t router_block_tokens(int64_t tokens) {
  return std::max<int64_t>(16, (tokens + 1023) / 1024);
}

inline constexpr int64_t kMaxSortBins = 8192;

// Items of a block of the counting sort: 256, or more where that would make more than 1024 blocks.
constexpr int64_t sort_block_items(int64_t items) {
  constexpr int64_t kTile = 256, kMaxBlocks = 1024;
  return std::max<int64_t>(1, (items + kTile * kMaxBlocks - 1) / (kTile * kMaxBlocks)) * kTile;
}

constexpr size_t counting_sort_scratch_bytes(int64_t items, int64_t bins) {
  const int64_t block = sort_block_items(items);
  const int64_t blocks = std::max<int64_t>(1, (items + block - 1) / block);
  return align_up(static_cast<size_t>(bins * blocks) * sizeof(int32_t)) +
         align_up(static_cast<size_t>(bins) * sizeof(int32_t));
}

// embedding_backward sorts tokens by id, a digit at a time: bits of an id, and bits of a digit, of which
// there are as few as 10 bits a digit allow, of equal size.
constexpr int token_sort_bits(int64_t vocabulary) {
  return std::max(1, static_cast<int>(std::bit_width(static_cast<uint64_t>(vocabulary - 1))));
}
constexpr int token_sort_digit_bits(int64_t vocabulary) {
  const int bits = token_sort_bits(vocabulary);
  const int digits = (bits + 9) / 10;
  return (bits + digits - 1) / digits;
}

// Sorted tokens that one block sums: 32, or more where that would make more than 512 pieces.
constexpr int64_t embedding_piece_tokens(int64_t tokens) {
  return std::max<int64_t>(32, (tokens + 511) / 512);
}

inline constexpr int64_t kSegmentsOfLaunch = 1024;
inline constexpr int64_t kSquaresBlockElements = 65536;

// Blocks that take the elements [begin, begin + count) in groups of 8 at multiples of 8.
constexpr int64_t segment_blocks(int64_t begin, int64_t count, int64_t block_elements) {
  const int64_t groups = count == 0 ? 0 : (begin + count + 7) / 8 - begin / 8;
  return (groups * 8 + block_elements - 1) / block_elements;
}

}  // namespace biomoe::cuda
