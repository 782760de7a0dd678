#include "biomoe/backend/cuda/gemm/sm90_select.cuh"

namespace biomoe::cuda::sm90 {

KernelChoice gate_up_kernel(const Tiling& tiling) {
  return select_kernel<Product::kGateUp>(tiling);
}

}  // namespace biomoe::cuda::sm90
