#include "biomoe/backend/cuda/gemm/sm90_select.cuh"

namespace biomoe::cuda::sm90 {

KernelChoice wgrad_kernel(const Tiling& tiling, GradientType type) {
  return type == GradientType::kFp32 ? select_kernel<Product::kWgradFp32>(tiling)
                                     : select_kernel<Product::kWgrad>(tiling);
}

}  // namespace biomoe::cuda::sm90
