#include "biomoe/ops/attention_calls.h"

#include <algorithm>
#include <bit>

#include "biomoe/core/arena.h"
#include "biomoe/core/error.h"
#include "biomoe/ops/attention.h"

namespace biomoe::cuda {
namespace {

// Backward keeps sums for max_seqlen rows of every sequence of a call: of all tokens this many times at most,
// but for one sequence.
constexpr int64_t kRowsOfCall = 2;

// What those sums, rows of all query heads, are kept below: of larger ones cuDNN's places are in doubt.
constexpr int64_t kMostSums = int64_t{1} << 31;

constexpr int64_t kTile = 128;  // of queries or keys, the largest in cuDNN's kernels

// Up to 1/8 more: a few plans serve all lengths.
int64_t round_length(int64_t length) {
  const auto power = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(length)));
  const int64_t step = std::max(kTile, power / 8);
  return (length + step - 1) / step * step;
}

int64_t power_above(int64_t value) {
  return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(value)));
}
int64_t power_below(int64_t value) {
  return static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(value)));
}

// Of the score gradients of one query head and sequence, bf16.
int64_t score_bytes(int64_t max_seqlen) {
  return 2 * max_seqlen * max_seqlen;
}

int64_t score_limit(const AttentionShape& shape, int64_t max_seqlen, int64_t max_tokens) {
  constexpr int64_t kLikeTheOtherWay = 16;  // bytes: fp32 dq, dk and dv of every query head, and their stores
  const int64_t group = shape.num_heads / shape.num_key_value_heads;
  return std::max(kLikeTheOtherWay * max_tokens * shape.num_heads * shape.head_dim,
                  group * score_bytes(max_seqlen));
}

}  // namespace

AttentionCalls attention_calls(const AttentionShape& shape, int64_t sequences, int64_t tokens,
                               bool cut_to_memory) {
  BM_CHECK(sequences > 0 && tokens > 0 && shape.max_seqlen > 0,
           "attention: {} tokens in {} sequences of {} at most", tokens, sequences, shape.max_seqlen);
  AttentionCalls calls;
  calls.max_tokens = round_length(tokens);
  calls.sequences = power_above(sequences);
  calls.key_value_heads = shape.num_key_value_heads;
  const int64_t longest = std::min(shape.max_seqlen, tokens);
  if (!cut_to_memory) {
    calls.max_seqlen = round_length(longest);
    const int64_t sums = calls.max_seqlen * shape.num_heads * shape.head_dim;  // of a sequence
    const int64_t fit = std::max<int64_t>(
        1, std::min(kRowsOfCall * calls.max_tokens / calls.max_seqlen, (kMostSums - 1) / sums));
    calls.sequences = std::min(calls.sequences, power_below(fit));
    calls.count = (sequences + calls.sequences - 1) / calls.sequences;
    return calls;
  }
  calls.max_seqlen = (longest + kTile - 1) / kTile * kTile;
  const int64_t group = shape.num_heads / shape.num_key_value_heads;
  const int64_t heads =
      score_limit(shape, calls.max_seqlen, calls.max_tokens) / score_bytes(calls.max_seqlen);
  calls.sequences = std::clamp<int64_t>(power_below(std::max<int64_t>(1, heads / shape.num_heads)), 1,
                                        power_above(sequences));
  calls.count = (sequences + calls.sequences - 1) / calls.sequences;
  while (calls.key_value_heads > 1 &&
         (calls.key_value_heads * group > heads || shape.num_key_value_heads % calls.key_value_heads != 0)) {
    --calls.key_value_heads;
  }
  return calls;
}

AttentionLists::AttentionLists(const AttentionCalls& calls)
    : lengths_stride(align_up(static_cast<size_t>(calls.sequences) * sizeof(int32_t)) / sizeof(int32_t)),
      offsets_stride(align_up(static_cast<size_t>(calls.sequences + 1) * sizeof(int64_t)) / sizeof(int64_t)),
      lengths_bytes(static_cast<size_t>(calls.count) * lengths_stride * sizeof(int32_t)),
      offsets_bytes(static_cast<size_t>(calls.count) * offsets_stride * sizeof(int64_t)) {}

size_t attention_key_gradient_bytes(const AttentionShape& shape, int64_t tokens) {
  return align_up(static_cast<size_t>(tokens * shape.num_key_value_heads * shape.head_dim) *
                  sizeof(uint16_t));
}

size_t attention_scratch_bytes(const AttentionShape& shape, int64_t tokens, bool deterministic) {
  if (tokens <= 0 || shape.max_seqlen <= 0) return 0;
  // There may be as many sequences as tokens. Lists of one sequence a call are the longest.
  const AttentionCalls whole = attention_calls(shape, tokens, tokens, false);
  const AttentionCalls cut = attention_calls(shape, tokens, tokens, deterministic);
  const size_t lists = std::max(AttentionLists(whole).bytes(), AttentionLists(cut).bytes());
  const int64_t query_width = shape.num_heads * shape.head_dim;
  // fp32 for each row: dk and dv of every query head before these are added up, the sum of dout * out, and
  // dq.
  const bool grouped = shape.num_heads != shape.num_key_value_heads;
  const int64_t row = (grouped ? 2 * query_width : 0) + shape.num_heads + (deterministic ? 0 : query_width);
  const int64_t rows =
      deterministic ? whole.max_tokens : std::max(kRowsOfCall * whole.max_tokens, whole.max_seqlen);
  const size_t sums = static_cast<size_t>(rows * row) * sizeof(float);
  const auto scores =
      static_cast<size_t>(deterministic ? score_limit(shape, cut.max_seqlen, cut.max_tokens) : int64_t{0});
  constexpr size_t kLibrary = size_t{64} << 20;  // what cuDNN takes besides; the request itself is checked
  return lists + 2 * attention_key_gradient_bytes(shape, tokens) + sums + scores + kLibrary;
}

}  // namespace biomoe::cuda
