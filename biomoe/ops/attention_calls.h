// How attention on a GPU is cut into calls of cuDNN, and the memory that these take. Host arithmetic from
// sizes alone, so that a plan for a GPU can be made on a machine without one.
#pragma once

#include <cstddef>
#include <cstdint>

namespace biomoe {
struct AttentionShape;
}

namespace biomoe::cuda {

// What cuDNN reads or writes by token: each has a pointer and, for each sequence, an offset of its first row.
enum AttentionOperand {
  kAttentionQ,
  kAttentionK,
  kAttentionV,
  kAttentionOut,
  kAttentionLse,  // [T, H]
  kAttentionDout,
  kAttentionDq,
  kAttentionDk,
  kAttentionDv,
  kAttentionOperands
};

// One plan of cuDNN serves every call. Sizes are rounded up, so that one plan also serves every batch of a
// run; sequences that are not there have length 0.
struct AttentionCalls {
  int64_t count = 1;            // of groups of sequences; each is called once for each group of heads
  int64_t sequences = 0;        // of a call
  int64_t key_value_heads = 0;  // of a call, with their query heads; divides G
  int64_t max_seqlen = 0;
  int64_t max_tokens = 0;
};

// Forward, and backward that adds up dq in any order, take all of it in one call. Backward in a fixed order
// keeps the score gradients of a whole call in memory, sequences * heads * max_seqlen^2 elements: it is cut
// so that these take no more than what the other way takes, or one sequence and key/value head at a time.
AttentionCalls attention_calls(const AttentionShape& shape, int64_t sequences, int64_t tokens,
                               bool cut_to_memory);

// Of the lists of sequences: lengths (i32), then offsets (i64) of each operand, by call.
struct AttentionLists {
  explicit AttentionLists(const AttentionCalls& calls);
  size_t lengths_stride;  // elements between the lists of one call and the next; keeps each list aligned
  size_t offsets_stride;
  size_t lengths_bytes;
  size_t offsets_bytes;  // of one operand
  size_t bytes() const { return lengths_bytes + kAttentionOperands * offsets_bytes; }
};

// Of dk or dv beside each other, which cuDNN writes before they go to their bands of a wider matrix.
size_t attention_key_gradient_bytes(const AttentionShape& shape, int64_t tokens);

}  // namespace biomoe::cuda
