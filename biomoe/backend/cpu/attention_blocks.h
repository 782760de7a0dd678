// How attention is cut into blocks of queries and chunks of keys, and the memory this takes. Shared by the
// forward and the backward pass.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>

#include "biomoe/backend/cpu/parallel.h"
#include "biomoe/backend/cpu/sgemm.h"
#include "biomoe/ops/attention.h"

namespace biomoe::cpu {

// Sizes that follow from the shape alone.
//
// The query heads of a key/value head are worked on together, as columns [token][head in group] of matrices
// whose rows are keys or elements of a head: one product serves them all, the softmax runs down columns,
// many of which fit a vector, and keys and values are read where they lie.
struct AttentionBlocks {
  explicit AttentionBlocks(const AttentionShape& shape_in)
      : shape(shape_in),
        group(shape.num_heads / shape.num_key_value_heads),
        tokens(std::clamp<int64_t>(kColumns / group, kMinTokens, kColumns)),
        scale(static_cast<float>(1.0 / std::sqrt(static_cast<double>(shape.head_dim)))) {}

  int64_t max_columns() const { return round_up(group * tokens); }
  // Between rows of those matrices: not a power of two, which would put a column into few cache sets.
  int64_t stride() const { return max_columns() + kOddLines; }
  // Between rows [column][element of a head].
  int64_t head_stride() const { return round_up(shape.head_dim) + kOddLines; }
  // Keys [first, end) of a sequence that some query of [begin, end) sees.
  int64_t first_key(int64_t begin) const {
    return shape.window ? std::max<int64_t>(0, begin - *shape.window + 1) : 0;
  }

  // As the products' kernel reads them.
  static int64_t round_up(int64_t columns) { return ceil_div(columns, kSgemmColumns) * kSgemmColumns; }

  static constexpr int64_t kKeys = 192;  // of a chunk; scores of a block stay in the level 2 cache

  AttentionShape shape;
  int64_t group;   // H / G
  int64_t tokens;  // of a query block
  float scale;     // 1 / sqrt(K)

 private:
  static constexpr int64_t kColumns = 64;  // half a block of tokens is computed and masked on the diagonal
  static constexpr int64_t kMinTokens = 8;
  static constexpr int64_t kOddLines = 16;
};

// Tokens [begin, end) of the batch.
struct Sequence {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t length() const { return end - begin; }
};

// Query tokens [begin, begin + count) of a sequence, counted from its start.
struct QueryBlock {
  Sequence sequence;
  int64_t begin = 0;
  int64_t count = 0;
};

// The sequences that have tokens. cu_seqlens must go from 0 to `tokens`.
std::span<const Sequence> list_sequences(Arena& scratch, const AttentionShape& shape,
                                         const TensorView& cu_seqlens_B1, int64_t tokens);

// The query blocks of each sequence, those with most keys first.
std::span<const QueryBlock> list_query_blocks(Arena& scratch, const AttentionBlocks& blocks,
                                              std::span<const Sequence> sequences);

// In how many parts backward cuts the queries of each sequence and key/value head, given how many sequences
// there are: enough to keep many threads busy with few sequences, but the same for any number of threads,
// since the parts' sums of dk and dv are added up afterwards.
int64_t backward_parts(const AttentionBlocks& blocks, int64_t sequences);

// The queries of a block that see one of the keys, counted from the start of the block. Keys count from the
// start of the sequence.
inline Range seeing_queries(const AttentionBlocks& blocks, const QueryBlock& block, Range keys) {
  const int64_t begin = std::clamp<int64_t>(keys.begin - block.begin, 0, block.count);
  const int64_t end = blocks.shape.window
                          ? std::clamp(keys.end - 1 + *blocks.shape.window - block.begin, begin, block.count)
                          : block.count;
  return {begin, end};
}

}  // namespace biomoe::cpu
