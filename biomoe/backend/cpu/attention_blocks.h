// How attention is cut into blocks of queries and chunks of keys, and the memory this takes. Shared by the
// forward and the backward pass.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>

#include "biomoe/backend/cpu/parallel.h"
#include "biomoe/ops/attention.h"

namespace biomoe::cpu {

// Sizes that follow from the shape alone.
struct AttentionBlocks {
  explicit AttentionBlocks(const AttentionShape& shape_in)
      : shape(shape_in),
        group(shape.num_heads / shape.num_key_value_heads),
        tokens(std::clamp<int64_t>(kRows / group, kMinTokens, kMaxTokens)),
        scale(static_cast<float>(1.0 / std::sqrt(static_cast<double>(shape.head_dim)))) {}

  // The query heads of a key/value head are worked on together, as rows [head in group][token] of one matrix,
  // so that one product serves them all.
  int64_t max_rows() const { return group * tokens; }
  // Keys [first, end) of a sequence that some query of [begin, end) sees.
  int64_t first_key(int64_t begin) const {
    return shape.window ? std::max<int64_t>(0, begin - *shape.window + 1) : 0;
  }

  // Between rows of scores: not a power of two, which would put a column into few cache sets.
  static constexpr int64_t kKeys = 512;  // of a chunk; scores of a block stay in the level 2 cache
  static constexpr int64_t kScoreStride = kKeys + 16;

  AttentionShape shape;
  int64_t group;   // H / G
  int64_t tokens;  // of a query block
  float scale;     // 1 / sqrt(K)

 private:
  static constexpr int64_t kRows = 128;
  static constexpr int64_t kMinTokens = 16;
  static constexpr int64_t kMaxTokens = 64;  // half a block is computed and masked on the diagonal
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

// The keys of one chunk that one query sees, counted from the start of the chunk.
inline Range visible_keys(const AttentionBlocks& blocks, int64_t query, Range chunk) {
  const int64_t end = std::clamp(query + 1, chunk.begin, chunk.end);
  const int64_t begin = std::clamp(blocks.first_key(query), chunk.begin, end);
  return {begin - chunk.begin, end - chunk.begin};
}

}  // namespace biomoe::cpu
