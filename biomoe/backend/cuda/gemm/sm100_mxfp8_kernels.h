// The kernels by type of their output: one translation unit for each, since each takes minutes to compile.
#pragma once

#include "biomoe/backend/cuda/gemm/sm100_mxfp8_grouped.h"

namespace biomoe::cuda::sm100 {

// As workspace_bytes() and launch(), for one type of output and without their checks. An expert without rows
// keeps its d.
struct Mxfp8Kernel {
  int64_t (*workspace_bytes)(int experts, int multiprocessors);
  cudaError_t (*launch)(const GroupedProduct& product, int multiprocessors, void* workspace,
                        cudaStream_t stream);
};

extern const Mxfp8Kernel kMxfp8ToBf16;
extern const Mxfp8Kernel kMxfp8ToFp32;

}  // namespace biomoe::cuda::sm100
