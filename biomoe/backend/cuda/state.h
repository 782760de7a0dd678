// What a context of the GPU holds: its stream, library handles, plans and the workspace of the libraries.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <memory>

#include "biomoe/core/context.h"
#include "biomoe/core/error.h"

namespace biomoe {

namespace cuda {

class GemmPlans;
class AttentionPlans;

// Throws failure with what CUDA says. `what` names the call or the kernel.
void check(cudaError_t error, const char* what);

// To be called after every launch: finds arguments that the launch was refused for.
inline void check_launch(const char* kernel) {
  check(cudaGetLastError(), kernel);
}

}  // namespace cuda

// One a context. Everything is made by the constructor but the plans, which each operation makes at its first
// call, before a recording. Shared pointers, since those delete what this header need not know.
struct DeviceState {
  DeviceState();
  ~DeviceState();
  DeviceState(const DeviceState&) = delete;
  DeviceState& operator=(const DeviceState&) = delete;

  cudaStream_t stream = nullptr;
  int compute_capability = 0;  // 10 * major + minor
  int multiprocessors = 0;
  cublasLtHandle_t cublas_lt = nullptr;
  // Scratch of whatever product runs on the stream. It begins with words that the products of experts find
  // and leave zero (sm90::kSplitTicketBytes of them); cuBLASLt is given what follows.
  void* split_workspace = nullptr;
  size_t split_workspace_bytes = 0;
  void* workspace = nullptr;  // of cuBLASLt
  size_t workspace_bytes = 0;
  std::shared_ptr<cuda::GemmPlans> gemm_plans;            // made at the first product
  std::shared_ptr<cuda::AttentionPlans> attention_plans;  // made at the first attention
};

}  // namespace biomoe
