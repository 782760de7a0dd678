// Checks, the choice of kernel, and the gradients of experts that have no rows.
#include "biomoe/backend/cuda/gemm/sm100_mxfp8_grouped.h"

#include <algorithm>

#include "biomoe/backend/cuda/gemm/sm100_mxfp8_kernels.h"

namespace biomoe::cuda::sm100 {
namespace {

constexpr int kThreads = 256;

const Mxfp8Kernel& kernel_of(OutputType type) {
  return type == OutputType::kBf16 ? kMxfp8ToBf16 : kMxfp8ToFp32;
}

cudaError_t attribute_of_current(cudaDeviceAttr name, int* value) {
  int device = 0;
  const cudaError_t status = cudaGetDevice(&device);
  return status == cudaSuccess ? cudaDeviceGetAttribute(value, name, device) : status;
}

cudaError_t check_capability() {
  int major = 0, minor = 0;
  cudaError_t status = attribute_of_current(cudaDevAttrComputeCapabilityMajor, &major);
  if (status == cudaSuccess) status = attribute_of_current(cudaDevAttrComputeCapabilityMinor, &minor);
  if (status != cudaSuccess) return status;
  return 10 * major + minor == kComputeCapability ? cudaSuccess : cudaErrorNotSupported;
}

bool usable(const MxOperand& operand) {
  return operand.codes != nullptr && operand.scales != nullptr &&
         reinterpret_cast<uintptr_t>(operand.codes) % 16 == 0 &&
         reinterpret_cast<uintptr_t>(operand.scales) % 128 == 0;
}

// Zeros for experts without rows, of which CUTLASS is told that their product has no extent. Blocks of x
// share an expert, y counts experts; 16 bytes at a time.
__global__ __launch_bounds__(kThreads) void clear_idle_experts_kernel(const int64_t* offsets,
                                                                      int64_t capacity, uint4* d,
                                                                      int64_t vectors) {
  const int64_t e = blockIdx.y;
  const int64_t rows = offsets ? offsets[e + 1] - offsets[e] : capacity;
  if (rows > 0) return;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < vectors;
       i += int64_t{gridDim.x} * kThreads) {
    d[e * vectors + i] = make_uint4(0, 0, 0, 0);
  }
}

cudaError_t clear_idle_experts(const GroupedProduct& product, int multiprocessors, cudaStream_t stream) {
  const int64_t element = product.type == OutputType::kBf16 ? 2 : 4;
  const int64_t vectors = product.m * product.n * element / 16;
  const int64_t blocks = std::min<int64_t>((vectors + kThreads - 1) / kThreads, multiprocessors);
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(product.experts));
  clear_idle_experts_kernel<<<grid, kThreads, 0, stream>>>(product.offsets, product.capacity,
                                                           static_cast<uint4*>(product.d), vectors);
  return cudaGetLastError();
}

}  // namespace

bool built() {
  return true;
}

cudaError_t workspace_bytes(int experts, int64_t* bytes) {
  int multiprocessors = 0;
  const cudaError_t status = attribute_of_current(cudaDevAttrMultiProcessorCount, &multiprocessors);
  if (status != cudaSuccess) return status;
  *bytes = std::max(kMxfp8ToBf16.workspace_bytes(experts, multiprocessors),
                    kMxfp8ToFp32.workspace_bytes(experts, multiprocessors));
  return cudaSuccess;
}

cudaError_t launch(const GroupedProduct& product, void* workspace, int64_t bytes, cudaStream_t stream) {
  int multiprocessors = 0;
  cudaError_t status = check_capability();
  if (status == cudaSuccess) status = attribute_of_current(cudaDevAttrMultiProcessorCount, &multiprocessors);
  if (status != cudaSuccess) return status;
  const Mxfp8Kernel& kernel = kernel_of(product.type);
  if (!sizes_supported(product) || product.d == nullptr || reinterpret_cast<uintptr_t>(product.d) % 16 != 0 ||
      reinterpret_cast<uintptr_t>(workspace) % 128 != 0 ||
      bytes < kernel.workspace_bytes(product.experts, multiprocessors)) {
    return cudaErrorInvalidValue;
  }
  if (product.segments == SegmentAxis::kSums && !product.accumulate) {
    status = clear_idle_experts(product, multiprocessors, stream);
    if (status != cudaSuccess) return status;
  }
  if (product.capacity == 0) return cudaSuccess;
  if (!usable(product.a) || !usable(product.b)) return cudaErrorInvalidValue;
  return kernel.launch(product, multiprocessors, workspace, stream);
}

}  // namespace biomoe::cuda::sm100
