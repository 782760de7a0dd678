#include "biomoe/backend/cuda/gemm/sm90_select.cuh"

namespace biomoe::cuda::sm90 {

KernelChoice forward_kernel(const Tiling& tiling, OperandType type) {
  return select_kernel<Product::kForward>(tiling, type);
}

}  // namespace biomoe::cuda::sm90
