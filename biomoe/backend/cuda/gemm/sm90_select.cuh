// Instantiates the kernel for both cluster sizes.
#pragma once

#include "biomoe/backend/cuda/gemm/sm90_kernel.cuh"
#include "biomoe/backend/cuda/gemm/sm90_kernels.h"

namespace biomoe::cuda::sm90 {

template <Product kProduct>
KernelChoice select_kernel(const Tiling& tiling) {
  const void* one = reinterpret_cast<const void*>(&grouped_gemm_kernel<Config<kProduct, 1>>);
  const void* two = reinterpret_cast<const void*>(&grouped_gemm_kernel<Config<kProduct, 2>>);
  return {tiling.cluster == 2 ? two : one, Config<kProduct, 1>::kSharedBytes};
}

}  // namespace biomoe::cuda::sm90
