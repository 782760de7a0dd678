// The kernels of the family, by product and tiling: one translation unit for each product.
#pragma once

#include "biomoe/backend/cuda/gemm/grouped_gemm_sm90.h"

namespace biomoe::cuda::sm90 {

struct KernelChoice {
  const void* function = nullptr;
  int shared_bytes = 0;
};

KernelChoice forward_kernel(const Tiling& tiling, OperandType type);
KernelChoice gate_up_kernel(const Tiling& tiling);  // of BF16, as the next two
KernelChoice dgrad_kernel(const Tiling& tiling);    // with codes it is the forward kernel
KernelChoice down_dgrad_kernel(const Tiling& tiling);
KernelChoice wgrad_kernel(const Tiling& tiling, GradientType result, OperandType operands);

// dprob[r] = sum over n_tiles of partials[r, :], for r < offsets[experts].
cudaError_t launch_sum_dprob(const KernelParams& params, float* dprob, cudaStream_t stream);

}  // namespace biomoe::cuda::sm90
