#include "biomoe/backend/cuda/attention_rows.h"

namespace biomoe::cuda {
namespace {

constexpr int kThreads = 256;

struct ListsKernelArgs {
  const int32_t* cu_seqlens;
  int64_t sequences;
  int64_t sequences_of_call;
  int64_t lengths_stride;
  int64_t offsets_stride;
  int32_t* lengths;
  int64_t* offsets[kAttentionOperands];
  int64_t strides[kAttentionOperands];
};

// Block x of grid: entries of a list; y: calls.
__global__ void attention_lists_kernel(ListsKernelArgs args) {
  const int64_t entry = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t call = blockIdx.y;
  if (entry > args.sequences_of_call) return;
  const int64_t sequence = call * args.sequences_of_call + entry;
  const int64_t begin = args.cu_seqlens[min(sequence, args.sequences)];
  const int64_t end = args.cu_seqlens[min(sequence + 1, args.sequences)];
  if (entry < args.sequences_of_call) {
    args.lengths[call * args.lengths_stride + entry] = static_cast<int32_t>(end - begin);
  }
  for (int operand = 0; operand < kAttentionOperands; ++operand) {
    if (args.strides[operand] == 0) continue;
    args.offsets[operand][call * args.offsets_stride + entry] = begin * args.strides[operand];
  }
}

// One block a sequence.
__global__ void single_key_rows_kernel(SingleKeyRowsArgs args) {
  for (int64_t sequence = blockIdx.x; sequence < args.sequences; sequence += gridDim.x) {
    const int64_t begin = args.cu_seqlens[sequence];
    const int64_t length = args.cu_seqlens[sequence + 1] - begin;
    if (length == 0) continue;
    uint16_t* dq = args.dq + begin * args.dq_stride;
    for (int64_t i = threadIdx.x; i < args.dq_width; i += blockDim.x) dq[i] = 0;
    if (length > 1) continue;
    uint16_t* dk = args.dk + begin * args.dk_stride;
    for (int64_t i = threadIdx.x; i < args.dk_width; i += blockDim.x) dk[i] = 0;
  }
}

}  // namespace

cudaError_t make_attention_lists(cudaStream_t stream, const AttentionListsArgs& args) {
  const AttentionLists lists(args.calls);
  ListsKernelArgs kernel_args{.cu_seqlens = args.cu_seqlens,
                              .sequences = args.sequences,
                              .sequences_of_call = args.calls.sequences,
                              .lengths_stride = static_cast<int64_t>(lists.lengths_stride),
                              .offsets_stride = static_cast<int64_t>(lists.offsets_stride),
                              .lengths = args.lengths,
                              .offsets = {},
                              .strides = {}};
  for (size_t operand = 0; operand < kAttentionOperands; ++operand) {
    kernel_args.offsets[operand] = args.offsets[operand];
    kernel_args.strides[operand] = args.strides[operand];
  }
  const dim3 grid(static_cast<unsigned>((args.calls.sequences + kThreads) / kThreads),
                  static_cast<unsigned>(args.calls.count));
  attention_lists_kernel<<<grid, kThreads, 0, stream>>>(kernel_args);
  return cudaGetLastError();
}

cudaError_t clear_single_key_rows(cudaStream_t stream, const SingleKeyRowsArgs& args) {
  constexpr int64_t kMaxBlocks = 1024;
  const auto blocks = static_cast<unsigned>(args.sequences < kMaxBlocks ? args.sequences : kMaxBlocks);
  single_key_rows_kernel<<<blocks, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace biomoe::cuda
