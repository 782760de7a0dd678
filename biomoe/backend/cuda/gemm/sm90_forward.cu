#include "biomoe/backend/cuda/gemm/sm90_select.cuh"

namespace biomoe::cuda::sm90 {

KernelChoice forward_kernel(const Tiling& tiling) {
  return select_kernel<Product::kForward>(tiling);
}

}  // namespace biomoe::cuda::sm90
