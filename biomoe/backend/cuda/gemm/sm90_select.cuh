// Instantiates the kernel for both cluster sizes, and for both types of operands where a product has them.
#pragma once

#include "biomoe/backend/cuda/gemm/sm90_kernel.cuh"
#include "biomoe/backend/cuda/gemm/sm90_kernels.h"

namespace biomoe::cuda::sm90 {

template <Product kProduct, OperandType kType = OperandType::kBf16>
KernelChoice select_kernel(const Tiling& tiling) {
  const void* one = reinterpret_cast<const void*>(&grouped_gemm_kernel<Config<kProduct, kType, 1>>);
  const void* two = reinterpret_cast<const void*>(&grouped_gemm_kernel<Config<kProduct, kType, 2>>);
  return {tiling.cluster == 2 ? two : one, Config<kProduct, kType, 1>::kSharedBytes};
}

template <Product kProduct>
KernelChoice select_kernel(const Tiling& tiling, OperandType type) {
  return type == OperandType::kFp8 ? select_kernel<kProduct, OperandType::kFp8>(tiling)
                                   : select_kernel<kProduct>(tiling);
}

}  // namespace biomoe::cuda::sm90
