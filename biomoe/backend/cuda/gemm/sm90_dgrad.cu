#include "biomoe/backend/cuda/gemm/sm90_select.cuh"

namespace biomoe::cuda::sm90 {

KernelChoice dgrad_kernel(const Tiling& tiling) {
  return select_kernel<Product::kDgrad>(tiling);
}

}  // namespace biomoe::cuda::sm90
