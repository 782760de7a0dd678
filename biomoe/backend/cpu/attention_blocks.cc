#include "biomoe/backend/cpu/attention_blocks.h"

#include "biomoe/core/error.h"

namespace biomoe {

size_t cpu::attention_scratch_bytes(const AttentionShape& shape, int64_t tokens, int num_threads) {
  const cpu::AttentionBlocks blocks(shape);
  const auto floats = [](int64_t count) { return align_up(static_cast<size_t>(count) * sizeof(float)); };
  // Backward, which takes more than forward: q and dout as columns; q, dout and dq as rows; scores and their
  // gradient; heads of a chunk; lse and delta.
  const size_t thread = 2 * floats(shape.head_dim * blocks.stride()) +
                        3 * floats(blocks.max_columns() * blocks.head_stride()) +
                        2 * floats(blocks.kKeys * blocks.stride()) +
                        floats(blocks.kKeys * blocks.head_stride()) + 2 * floats(blocks.stride());
  // Sums of dk and dv by part. The batch may turn out shorter than `tokens`, with fewer sequences and so more
  // parts.
  const int64_t longest = std::clamp<int64_t>(shape.max_seqlen, 1, std::max<int64_t>(1, tokens));
  size_t sums = 0;
  for (int64_t sequences = 1;; ++sequences) {
    const int64_t parts = cpu::backward_parts(blocks, sequences);
    if (parts == 1) break;
    const int64_t covered = std::min(tokens, sequences * longest);
    const int64_t width = shape.num_key_value_heads * shape.head_dim;
    sums = std::max(sums, 2 * floats((parts - 1) * covered * width));
    if (covered == tokens) break;
  }
  // A sequence or a block has one token at least.
  const size_t lists = align_up(static_cast<size_t>(tokens) * sizeof(cpu::Sequence)) +
                       align_up(static_cast<size_t>(tokens) * sizeof(cpu::QueryBlock));
  // Besides, a few pointers a thread.
  return lists + sums + static_cast<size_t>(std::max(1, num_threads)) * (thread + kArenaAlignment);
}

}  // namespace biomoe

namespace biomoe::cpu {

std::span<const Sequence> list_sequences(Arena& scratch, const AttentionShape& shape,
                                         const TensorView& cu_seqlens_B1, int64_t tokens) {
  const int32_t* cu_seqlens = cu_seqlens_B1.i32();
  const int64_t count = cu_seqlens_B1.shape[0] - 1;
  BM_CHECK(cu_seqlens[0] == 0 && cu_seqlens[count] == tokens,
           "attention: cu_seqlens covers [{}, {}) of {} tokens", cu_seqlens[0], cu_seqlens[count], tokens);
  auto* list = static_cast<Sequence*>(scratch.allocate(static_cast<size_t>(tokens) * sizeof(Sequence)));
  size_t size = 0;
  for (int64_t b = 0; b < count; ++b) {
    const int64_t length = int64_t{cu_seqlens[b + 1]} - cu_seqlens[b];
    BM_CHECK(length >= 0 && length <= shape.max_seqlen,
             "attention: sequence {} has {} tokens, expected 0 to {}", b, length, shape.max_seqlen);
    if (length > 0) list[size++] = {cu_seqlens[b], cu_seqlens[b + 1]};
  }
  return {list, size};
}

std::span<const QueryBlock> list_query_blocks(Arena& scratch, const AttentionBlocks& blocks,
                                              std::span<const Sequence> sequences) {
  int64_t count = 0;
  for (const Sequence& sequence : sequences) count += ceil_div(sequence.length(), blocks.tokens);
  auto* list = static_cast<QueryBlock*>(scratch.allocate(static_cast<size_t>(count) * sizeof(QueryBlock)));
  size_t size = 0;
  for (const Sequence& sequence : sequences) {
    for (int64_t block = ceil_div(sequence.length(), blocks.tokens) - 1; block >= 0; --block) {
      const int64_t begin = block * blocks.tokens;
      list[size++] = {sequence, begin, std::min(blocks.tokens, sequence.length() - begin)};
    }
  }
  return {list, size};
}

int64_t backward_parts(const AttentionBlocks& blocks, int64_t sequences) {
  constexpr int64_t kEnoughItems = 16;
  const int64_t items = std::max<int64_t>(1, sequences * blocks.shape.num_key_value_heads);
  const int64_t query_blocks = ceil_div(blocks.shape.max_seqlen, blocks.tokens);
  return std::clamp<int64_t>(ceil_div(kEnoughItems, items), 1, std::max<int64_t>(1, query_blocks));
}

}  // namespace biomoe::cpu
