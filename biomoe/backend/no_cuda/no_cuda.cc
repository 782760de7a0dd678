// Stands in for backend/cuda where the program is built without CUDA.
#include "biomoe/core/error.h"
#include "biomoe/ops/device.h"
#include "biomoe/ops/op_list.h"

namespace biomoe::cuda {
namespace {

constexpr const char* kMissing = "this biomoe was built without CUDA; build it with BIOMOE_CUDA=ON";

Error no_cuda(const char* what) {
  return user_error("{}: {}, or set device=cpu", what, kMissing);
}

}  // namespace

#define BIOMOE_THROW_NO_CUDA(name, Args) \
  void name(Context&, const Args&) {     \
    throw no_cuda(#name);                \
  }
BIOMOE_FOR_EACH_OP(BIOMOE_THROW_NO_CUDA)
#undef BIOMOE_THROW_NO_CUDA

bool available(std::string* why) {
  if (why) *why = kMissing;
  return false;
}

int64_t count() {
  return 0;
}

void select(int64_t) {
  throw no_cuda("the GPU");
}

DeviceInfo info() {
  throw no_cuda("the GPU");
}
MemorySource& memory() {
  throw no_cuda("GPU memory");
}
MemorySource& staging() {
  throw no_cuda("pinned memory");
}
DeviceState* create_state() {
  throw no_cuda("the GPU");
}
void* stream(DeviceState*) {
  throw no_cuda("the GPU");
}
void copy(DeviceState*, void*, const void*, size_t) {
  throw no_cuda("copy");
}
void wait_sync(DeviceState*) {
  throw no_cuda("wait");
}
bool idle(DeviceState*) {
  throw no_cuda("wait");
}
void begin_recording(DeviceState*) {
  throw no_cuda("recording");
}
void* end_recording(DeviceState*) {
  throw no_cuda("recording");
}
void replay(DeviceState*, void*) {
  throw no_cuda("replay");
}
void* create_event() {
  throw no_cuda("event");
}
void record_event(DeviceState*, void*) {
  throw no_cuda("event");
}
double elapsed_ms_sync(void*, void*) {
  throw no_cuda("event");
}

// Of what could not be made there is nothing to end or to destroy.
void destroy_state(DeviceState*) noexcept {}
void abandon_recording(DeviceState*) noexcept {}
void destroy_recording(void*) noexcept {}
void destroy_event(void*) noexcept {}

int64_t sync_calls() {
  return 0;
}

void* create_side_queue() {
  throw no_cuda("the GPU");
}
void destroy_side_queue(void*) noexcept {}
void* side_stream(void*) {
  throw no_cuda("the GPU");
}
void fork_side_queue(DeviceState*, void*) {
  throw no_cuda("the GPU");
}
void mark_side_queue(void*, size_t) {
  throw no_cuda("the GPU");
}
void join_side_queue(DeviceState*, void*, size_t) {
  throw no_cuda("the GPU");
}

int64_t reservations() {
  return 0;
}

}  // namespace biomoe::cuda
