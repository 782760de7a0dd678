// Stands in for the kernels of sm_100a where the program is built without BIOMOE_SM100.
#include "biomoe/backend/cuda/gemm/sm100_mxfp8_grouped.h"

namespace biomoe::cuda::sm100 {

bool built() {
  return false;
}

cudaError_t workspace_bytes(int, int64_t*) {
  return cudaErrorNotSupported;
}

cudaError_t launch(const GroupedProduct&, void*, int64_t, cudaStream_t) {
  return cudaErrorNotSupported;
}

}  // namespace biomoe::cuda::sm100
