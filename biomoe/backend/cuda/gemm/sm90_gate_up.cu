#include "biomoe/backend/cuda/gemm/sm90_select.cuh"

namespace biomoe::cuda::sm90 {

KernelChoice gate_up_kernel(const Tiling& tiling, OperandType type) {
  return select_kernel<Product::kGateUp>(tiling, type);
}

}  // namespace biomoe::cuda::sm90
