// The services of ops/device.h on the GPU.
#include "biomoe/ops/device.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstring>

#include "biomoe/backend/cuda/gemm/grouped_gemm_sm90.h"
#include "biomoe/backend/cuda/gemm/sm100_mxfp8_grouped.h"
#include "biomoe/backend/cuda/state.h"
#include "biomoe/ops/cuda_sizes.h"
#include "biomoe/ops/gpu_obstacle.h"

namespace biomoe {
namespace {

static_assert(cuda::kProductTicketBytes == cuda::sm90::kSplitTicketBytes);

std::atomic<int64_t> g_sync_calls{0}, g_reservations{0};

void check_cublas(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS) throw failure("{}: {}", what, cublasLtGetStatusString(status));
}

int attribute(cudaDeviceAttr name, int device) {
  int value = 0;
  cuda::check(cudaDeviceGetAttribute(&value, name, device), "cudaDeviceGetAttribute");
  return value;
}

int current_device() {
  int device = 0;
  cuda::check(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

int compute_capability(int device) {
  return 10 * attribute(cudaDevAttrComputeCapabilityMajor, device) +
         attribute(cudaDevAttrComputeCapabilityMinor, device);
}

int64_t visible_devices() {
  int count = 0;
  cuda::check(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  return count;
}

// Empty when the current device can be used.
std::string what_is_missing() {
  GpuFindings found;
  found.runtime = CUDART_VERSION;
  if (cudaDriverGetVersion(&found.driver) != cudaSuccess) found.driver = 0;
  const cudaError_t error = cudaGetDeviceCount(&found.count);
  cudaGetLastError();  // the runtime keeps the error for the next call otherwise
  if (error != cudaSuccess) found.count = 0;
  if (error != cudaSuccess && error != cudaErrorNoDevice) found.error = cudaGetErrorString(error);
  if (found.count > 0) {
    const int device = current_device();
    found.capability = compute_capability(device);
    if (found.capability < kOldestCapability) {  // for the message alone: asking takes long
      cudaDeviceProp properties{};
      cuda::check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
      found.name = properties.name;
    }
  }
  return gpu_obstacle(found);
}

class DeviceMemory : public MemorySource {
 public:
  void* reserve(size_t bytes, const char* name) override {
    void* memory = nullptr;
    ++g_reservations;
    const cudaError_t error = cudaMalloc(&memory, bytes);
    if (error != cudaSuccess) {
      cudaGetLastError();
      size_t free = 0, total = 0;
      cudaMemGetInfo(&free, &total);
      throw failure("cannot reserve {} bytes of GPU memory for {}: {} ({} of {} bytes are free)", bytes, name,
                    cudaGetErrorString(error), free, total);
    }
    fill(memory, 0, bytes);
    return memory;
  }
  void free(void* memory, size_t) noexcept override {
    ++g_sync_calls;
    cudaFree(memory);
  }
  void fill(void* memory, unsigned char byte, size_t bytes) override {
    ++g_sync_calls;
    cuda::check(cudaDeviceSynchronize(), "work before a fill of GPU memory");
    cuda::check(cudaMemset(memory, byte, bytes), "cudaMemset");
    cuda::check(cudaDeviceSynchronize(), "cudaMemset");
  }
};

class StagingMemory : public MemorySource {
 public:
  void* reserve(size_t bytes, const char* name) override {
    void* memory = nullptr;
    ++g_reservations;
    ++g_sync_calls;
    const cudaError_t error = cudaHostAlloc(&memory, bytes, cudaHostAllocPortable);
    if (error != cudaSuccess) {
      cudaGetLastError();
      throw failure("cannot reserve {} bytes of pinned memory for {}: {}", bytes, name,
                    cudaGetErrorString(error));
    }
    std::memset(memory, 0, bytes);
    return memory;
  }
  void free(void* memory, size_t) noexcept override {
    ++g_sync_calls;
    cudaFreeHost(memory);
  }
  void fill(void* memory, unsigned char byte, size_t bytes) override {
    ++g_sync_calls;
    cuda::check(cudaDeviceSynchronize(), "work before a fill of pinned memory");
    std::memset(memory, byte, bytes);
  }
};

// Pages that the driver does not know: it copies them through memory of its own, and the host waits.
bool pageable(const void* memory) {
  cudaPointerAttributes attributes{};
  cuda::check(cudaPointerGetAttributes(&attributes, memory), "cudaPointerGetAttributes");
  return attributes.type == cudaMemoryTypeUnregistered;
}

}  // namespace

DeviceState::DeviceState() {
  const int device = current_device();
  compute_capability = biomoe::compute_capability(device);
  multiprocessors = attribute(cudaDevAttrMultiProcessorCount, device);
  // Not a stream that waits for the default stream: nothing here uses that one but fills, which wait.
  cuda::check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  check_cublas(cublasLtCreate(&cublas_lt), "cublasLtCreate");
  int64_t split_bytes = 0;
  cuda::check(cuda::sm90::split_workspace_bytes(&split_bytes), "split_workspace_bytes");
  split_workspace_bytes = cuda::kProductWorkspaceBytes;
  BM_CHECK(static_cast<size_t>(split_bytes) <= split_workspace_bytes,
           "{} multiprocessors need {} bytes for split products, {} are planned", multiprocessors,
           split_bytes, split_workspace_bytes);
  split_workspace = cuda::memory().reserve(split_workspace_bytes, "the workspace of products");
  workspace = static_cast<std::byte*>(split_workspace) + cuda::kProductTicketBytes;
  workspace_bytes = split_workspace_bytes - cuda::kProductTicketBytes;
}

DeviceState::~DeviceState() {
  cudaStreamSynchronize(stream);
  gemm_plans.reset();
  attention_plans.reset();
  cuda::memory().free(split_workspace, split_workspace_bytes);
  cublasLtDestroy(cublas_lt);
  cudaStreamDestroy(stream);
}

namespace cuda {

void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) [[unlikely]]
    throw failure("{}: {} ({})", what, cudaGetErrorString(error), cudaGetErrorName(error));
}

bool available(std::string* why) {
  const std::string missing = what_is_missing();
  if (why) *why = missing;
  return missing.empty();
}

int64_t count() {
  return what_is_missing().empty() ? visible_devices() : 0;
}

void select(int64_t index) {
  check(cudaSetDevice(static_cast<int>(index)), "cudaSetDevice");
}

DeviceInfo info() {
  const std::string missing = what_is_missing();
  if (!missing.empty()) throw user_error("{}, or set device=cpu", missing);
  const int device = current_device();
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  DeviceInfo info;
  info.name = properties.name;
  info.compute_capability = compute_capability(device);
  info.multiprocessors = properties.multiProcessorCount;
  info.mx_products = cuda::sm100::built() && info.compute_capability == cuda::sm100::kComputeCapability;
  check(cudaMemGetInfo(&info.free_bytes, &info.memory_bytes), "cudaMemGetInfo");
  int driver = 0, runtime = 0;
  check(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
  info.driver = "CUDA " + cuda_version_text(driver);
  info.runtime = fmt::format("CUDA {}, cuBLASLt {}", cuda_version_text(runtime), cublasLtGetVersion());
  std::array<char, 32> bus_id{};
  check(cudaDeviceGetPCIBusId(bus_id.data(), static_cast<int>(bus_id.size()), device),
        "cudaDeviceGetPCIBusId");
  info.bus_id = bus_id.data();
  return info;
}

MemorySource& memory() {
  static DeviceMemory memory;
  return memory;
}

MemorySource& staging() {
  static StagingMemory memory;
  return memory;
}

DeviceState* create_state() {
  const std::string missing = what_is_missing();
  if (!missing.empty()) throw user_error("{}, or set device=cpu", missing);
  return new DeviceState();
}

void destroy_state(DeviceState* state) noexcept {
  ++g_sync_calls;
  delete state;
}

void* stream(DeviceState* state) {
  return state->stream;
}

void copy(DeviceState* state, void* to, const void* from, size_t bytes) {
  if (bytes == 0) return;
  if (pageable(to) || pageable(from)) ++g_sync_calls;
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, state->stream), "cudaMemcpyAsync");
}

void wait_sync(DeviceState* state) {
  ++g_sync_calls;
  check(cudaStreamSynchronize(state->stream), "work on the GPU");
}

bool idle(DeviceState* state) {
  const cudaError_t status = cudaStreamQuery(state->stream);
  if (status == cudaErrorNotReady) return false;
  check(status, "work on the GPU");
  return true;
}

void begin_recording(DeviceState* state) {
  check(cudaStreamBeginCapture(state->stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
}

void* end_recording(DeviceState* state) {
  cudaGraph_t graph = nullptr;
  check(cudaStreamEndCapture(state->stream, &graph), "cudaStreamEndCapture");
  cudaGraphExec_t executable = nullptr;
  const cudaError_t error = cudaGraphInstantiate(&executable, graph, 0);
  cudaGraphDestroy(graph);
  check(error, "cudaGraphInstantiate");
  return executable;
}

void abandon_recording(DeviceState* state) noexcept {
  cudaGraph_t graph = nullptr;
  cudaStreamEndCapture(state->stream, &graph);
  if (graph) cudaGraphDestroy(graph);
  cudaGetLastError();
}

void replay(DeviceState* state, void* graph) {
  check(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), state->stream), "cudaGraphLaunch");
}

void destroy_recording(void* graph) noexcept {
  cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph));
}

void* create_event() {
  cudaEvent_t event = nullptr;
  check(cudaEventCreate(&event), "cudaEventCreate");
  return event;
}

void destroy_event(void* event) noexcept {
  cudaEventDestroy(static_cast<cudaEvent_t>(event));
}

void record_event(DeviceState* state, void* event) {
  check(cudaEventRecord(static_cast<cudaEvent_t>(event), state->stream), "cudaEventRecord");
}

double elapsed_ms_sync(void* begin, void* end) {
  ++g_sync_calls;
  check(cudaEventSynchronize(static_cast<cudaEvent_t>(end)), "cudaEventSynchronize");
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, static_cast<cudaEvent_t>(begin), static_cast<cudaEvent_t>(end)),
        "cudaEventElapsedTime");
  return static_cast<double>(milliseconds);
}

int64_t sync_calls() {
  return g_sync_calls;
}

int64_t reservations() {
  return g_reservations;
}

}  // namespace cuda
}  // namespace biomoe
