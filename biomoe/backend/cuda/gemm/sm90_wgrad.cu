#include "biomoe/backend/cuda/gemm/sm90_select.cuh"

namespace biomoe::cuda::sm90 {

KernelChoice wgrad_kernel(const Tiling& tiling, GradientType result, OperandType operands) {
  return result == GradientType::kFp32 ? select_kernel<Product::kWgradFp32>(tiling, operands)
                                       : select_kernel<Product::kWgrad>(tiling, operands);
}

}  // namespace biomoe::cuda::sm90
