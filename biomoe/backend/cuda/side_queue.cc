// Work beside a context's own: a stream, and where the driver can, multiprocessors that it keeps to.
#include <cuda.h>
#include <cuda_runtime.h>

#include <memory>

#include "biomoe/backend/cuda/state.h"
#include "biomoe/ops/device.h"

namespace biomoe::cuda {
namespace {

// The driver's functions, by way of the runtime, so that no program links against the driver library.
template <typename Function>
Function* driver_function(const char* name) {
  constexpr unsigned kSince = 12050;  // of all that are asked for here
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion(name, &function, kSince, cudaEnableDefault, &found);
  cudaGetLastError();
  return status == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Function*>(function)
                                                                       : nullptr;
}

struct DividedDevice {
  CUgreenCtx context = nullptr;
  CUstream stream = nullptr;
};

// A green context of `multiprocessors` of the current device, and a stream in it; nothing where the driver
// refuses any of it. Kernels of its stream, recorded ones too, run on these alone; those of other streams may
// too, as far as they are free.
DividedDevice divide(int* multiprocessors) {
  auto* get_device = driver_function<decltype(cuCtxGetDevice)>("cuCtxGetDevice");
  auto* get_resource = driver_function<decltype(cuDeviceGetDevResource)>("cuDeviceGetDevResource");
  auto* split = driver_function<decltype(cuDevSmResourceSplitByCount)>("cuDevSmResourceSplitByCount");
  auto* describe = driver_function<decltype(cuDevResourceGenerateDesc)>("cuDevResourceGenerateDesc");
  auto* create = driver_function<decltype(cuGreenCtxCreate)>("cuGreenCtxCreate");
  auto* create_stream = driver_function<decltype(cuGreenCtxStreamCreate)>("cuGreenCtxStreamCreate");
  auto* destroy = driver_function<decltype(cuGreenCtxDestroy)>("cuGreenCtxDestroy");
  if (!get_device || !get_resource || !split || !describe || !create || !create_stream || !destroy) return {};
  CUdevice device = 0;
  CUdevResource all{}, part{}, rest{};
  CUdevResourceDesc described = nullptr;
  DividedDevice divided;
  unsigned parts = 1;
  const auto wanted = static_cast<unsigned>(*multiprocessors);
  if (get_device(&device) != CUDA_SUCCESS ||
      get_resource(device, &all, CU_DEV_RESOURCE_TYPE_SM) != CUDA_SUCCESS ||
      split(&part, &parts, &all, &rest, 0, wanted) != CUDA_SUCCESS || parts != 1 ||
      describe(&described, &part, 1) != CUDA_SUCCESS ||
      create(&divided.context, described, device, CU_GREEN_CTX_DEFAULT_STREAM) != CUDA_SUCCESS) {
    return {};
  }
  if (create_stream(&divided.stream, divided.context, CU_STREAM_NON_BLOCKING, 0) != CUDA_SUCCESS) {
    destroy(divided.context);
    return {};
  }
  *multiprocessors = static_cast<int>(part.sm.smCount);
  return divided;
}

class Queue {
 public:
  explicit Queue(int* multiprocessors) {
    if (*multiprocessors > 0) {
      const DividedDevice divided = divide(multiprocessors);
      context_ = divided.context;
      stream_ = divided.stream;
    }
    if (!stream_) {
      *multiprocessors = 0;
      check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    }
    check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "cudaEventCreate");
  }
  ~Queue() {
    cudaStreamSynchronize(stream_);
    cudaEventDestroy(event_);
    cudaStreamDestroy(stream_);
    if (!context_) return;
    if (auto* destroy = driver_function<decltype(cuGreenCtxDestroy)>("cuGreenCtxDestroy")) destroy(context_);
  }
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  cudaStream_t stream() const { return stream_; }
  // `after` goes on when `before` has done what it was given so far.
  void order(cudaStream_t before, cudaStream_t after) {
    check(cudaEventRecord(event_, before), "cudaEventRecord");
    check(cudaStreamWaitEvent(after, event_, 0), "cudaStreamWaitEvent");
  }

 private:
  CUgreenCtx context_ = nullptr;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t event_ = nullptr;
};

Queue& queue_of(void* queue) {
  return *static_cast<Queue*>(queue);
}

}  // namespace

void* create_side_queue(int* multiprocessors) {
  return new Queue(multiprocessors);
}

void destroy_side_queue(void* queue) noexcept {
  delete static_cast<Queue*>(queue);
}

void* side_stream(void* queue) {
  return queue_of(queue).stream();
}

void fork_side_queue(DeviceState* state, void* queue) {
  queue_of(queue).order(state->stream, queue_of(queue).stream());
}

void join_side_queue(DeviceState* state, void* queue) {
  queue_of(queue).order(queue_of(queue).stream(), state->stream);
}

}  // namespace biomoe::cuda
