// What attention does on the GPU besides cuDNN. Both return what the launch returned.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <cstdint>

#include "biomoe/ops/attention_calls.h"

namespace biomoe::cuda {

// lengths and offsets of every call (see AttentionLists) from cu_seqlens [sequences + 1]. An offset is the
// first token's number times the operand's stride; operands with a stride of 0 get none.
struct AttentionListsArgs {
  const int32_t* cu_seqlens = nullptr;
  int64_t sequences = 0;
  AttentionCalls calls;
  int32_t* lengths = nullptr;
  std::array<int64_t*, kAttentionOperands> offsets{};
  std::array<int64_t, kAttentionOperands> strides{};
};
cudaError_t make_attention_lists(cudaStream_t stream, const AttentionListsArgs& args);

// Where a query sees one key only, the softmax is constant, and what cuDNN gives for its score's gradient is
// rounding. Clears the rows of dq that hold nothing else, the first of every sequence, and of dk, where the
// sequence has one token.
struct SingleKeyRowsArgs {
  const int32_t* cu_seqlens = nullptr;
  int64_t sequences = 0;
  uint16_t* dq = nullptr;
  uint16_t* dk = nullptr;
  int64_t dq_stride = 0;
  int64_t dk_stride = 0;
  int64_t dq_width = 0;
  int64_t dk_width = 0;
};
cudaError_t clear_single_key_rows(cudaStream_t stream, const SingleKeyRowsArgs& args);

}  // namespace biomoe::cuda
