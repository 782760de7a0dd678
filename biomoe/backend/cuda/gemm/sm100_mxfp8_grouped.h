// MXFP8 products of experts on Blackwell's tensor cores (tcgen05.mma, kind mxf8f6f4), by CUTLASS: one launch
// over all experts with FP32 sums, with the routing read on the device. Built, not yet run on such a GPU.
// Without BIOMOE_SM100 backend/cuda/no_sm100 stands in.
#pragma once

#include <cuda_runtime_api.h>

#include "biomoe/backend/cuda/gemm/sm100_mxfp8_problem.h"

namespace biomoe::cuda::sm100 {

// 10 * major + minor of the GPUs that code for sm_100a runs on: no others, 10.3 included.
inline constexpr int kComputeCapability = 100;

// Whether this program has the kernels.
bool built();

// Bytes of workspace that launch() takes for so many experts on the current device.
// cudaErrorNotSupported: not built().
cudaError_t workspace_bytes(int experts, int64_t* bytes);

// Enqueues the product on `stream`; capturable in a CUDA graph. `workspace`, 128-byte aligned, is free again
// when the product has run.
// cudaErrorInvalidValue: sizes_supported() is false, an operand is absent or not aligned, or the workspace is
// too small; cudaErrorNotSupported: not built(), or the current GPU is of another compute capability.
cudaError_t launch(const GroupedProduct& product, void* workspace, int64_t bytes, cudaStream_t stream);

}  // namespace biomoe::cuda::sm100
