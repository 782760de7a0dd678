// Stands in for backend/cuda where the program is built without CUDA.
#include "biomoe/core/error.h"
#include "biomoe/ops/device.h"
#include "biomoe/ops/op_list.h"

namespace biomoe::cuda {
namespace {

constexpr const char* kWhy = "this biomoe was built without CUDA";

[[noreturn]] void refuse() {
  throw user_error("{}; set device=cpu", kWhy);
}

}  // namespace

#define BIOMOE_THROW_NO_CUDA(name, Args) \
  void name(Context&, const Args&) {     \
    refuse();                            \
  }
BIOMOE_FOR_EACH_OP(BIOMOE_THROW_NO_CUDA)
#undef BIOMOE_THROW_NO_CUDA

bool available(std::string* why) {
  if (why) *why = kWhy;
  return false;
}

DeviceInfo info() {
  refuse();
}
MemorySource& memory() {
  refuse();
}
MemorySource& staging() {
  refuse();
}
DeviceState* create_state() {
  refuse();
}
void destroy_state(DeviceState*) noexcept {}
void copy(DeviceState*, void*, const void*, size_t) {
  refuse();
}
void wait_sync(DeviceState*) {
  refuse();
}
void begin_recording(DeviceState*) {
  refuse();
}
void* end_recording(DeviceState*) {
  refuse();
}
void abandon_recording(DeviceState*) noexcept {}
void replay(DeviceState*, void*) {
  refuse();
}
void destroy_recording(void*) noexcept {}
void* create_event() {
  refuse();
}
void destroy_event(void*) noexcept {}
void record_event(DeviceState*, void*) {
  refuse();
}
double elapsed_ms_sync(void*, void*) {
  refuse();
}
int64_t sync_calls() {
  return 0;
}

}  // namespace biomoe::cuda
