#include "biomoe/backend/cuda/gemm/sm100_mxfp8_kernel.cuh"

namespace biomoe::cuda::sm100 {

const Mxfp8Kernel kMxfp8ToFp32{kernel_workspace_bytes<float>, launch_kernel<float>};

}  // namespace biomoe::cuda::sm100
