#include "biomoe/backend/cuda/gemm/sm100_mxfp8_kernel.cuh"

namespace biomoe::cuda::sm100 {

const Mxfp8Kernel kMxfp8ToBf16{kernel_workspace_bytes<cutlass::bfloat16_t>,
                               launch_kernel<cutlass::bfloat16_t>};

}  // namespace biomoe::cuda::sm100
