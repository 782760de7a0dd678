#include "biomoe/ops/device.h"

#include <unistd.h>

#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "biomoe/core/clock.h"

namespace biomoe {
namespace {

DeviceInfo host_info() {
  DeviceInfo info;
  info.name = "CPU";
  info.multiprocessors = static_cast<int>(std::thread::hardware_concurrency());
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  info.memory_bytes = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * page;
  info.free_bytes = static_cast<size_t>(sysconf(_SC_AVPHYS_PAGES)) * page;
  return info;
}

void copy(Context& ctx, void* to, const void* from, size_t bytes) {
  if (ctx.device == Device::kCuda) {
    cuda::copy(ctx.state, to, from, bytes);
  } else if (bytes > 0) {
    std::memcpy(to, from, bytes);
  }
}

}  // namespace

bool device_available(Device device, std::string* why) {
  if (device == Device::kCuda) return cuda::available(why);
  if (why) why->clear();
  return true;
}

DeviceInfo device_info(Device device) {
  return device == Device::kCuda ? cuda::info() : host_info();
}

int64_t device_count(Device device) {
  return device == Device::kCuda ? cuda::count() : 1;
}

void select_device(Device device, int64_t index) {
  if (device == Device::kCuda) cuda::select(index);
}

MemorySource& device_memory(Device device) {
  return device == Device::kCuda ? cuda::memory() : host_memory();
}

MemorySource& staging_memory(Device device) {
  return device == Device::kCuda ? cuda::staging() : host_memory();
}

DeviceHandle::DeviceHandle(Device device) {
  if (device == Device::kCuda) state_ = cuda::create_state();
}

DeviceHandle::~DeviceHandle() {
  if (state_) cuda::destroy_state(state_);
}

DeviceHandle::DeviceHandle(DeviceHandle&& other) noexcept : state_(std::exchange(other.state_, nullptr)) {}

DeviceHandle& DeviceHandle::operator=(DeviceHandle&& other) noexcept {
  std::swap(state_, other.state_);
  return *this;
}

void* DeviceHandle::stream() const {
  return state_ ? cuda::stream(state_) : nullptr;
}

void copy_to_device(Context& ctx, void* device, const void* host, size_t bytes) {
  copy(ctx, device, host, bytes);
}

void copy_to_host(Context& ctx, void* host, const void* device, size_t bytes) {
  copy(ctx, host, device, bytes);
}

void copy_on_device(Context& ctx, void* to, const void* from, size_t bytes) {
  copy(ctx, to, from, bytes);
}

void device_wait_sync(Context& ctx) {
  if (ctx.device == Device::kCuda) cuda::wait_sync(ctx.state);
}

bool device_wait_sync(Context& ctx, double seconds) {
  constexpr auto kLook = std::chrono::microseconds(20);
  if (ctx.device == Device::kCpu) return true;
  const double begin = now_seconds();
  while (!cuda::idle(ctx.state)) {
    if (now_seconds() - begin > seconds) return false;
    std::this_thread::sleep_for(kLook);
  }
  device_wait_sync(ctx);
  return true;
}

RecordedStep::~RecordedStep() {
  if (graph_) cuda::destroy_recording(graph_);
}

RecordedStep::RecordedStep(RecordedStep&& other) noexcept : graph_(std::exchange(other.graph_, nullptr)) {}

RecordedStep& RecordedStep::operator=(RecordedStep&& other) noexcept {
  std::swap(graph_, other.graph_);
  return *this;
}

void RecordedStep::begin(Context& ctx) {
  BM_CHECK(supported(ctx), "the CPU does not record steps");
  cuda::begin_recording(ctx.state);
}

RecordedStep RecordedStep::end(Context& ctx) {
  RecordedStep step;
  step.graph_ = cuda::end_recording(ctx.state);
  return step;
}

void RecordedStep::abandon(Context& ctx) noexcept {
  cuda::abandon_recording(ctx.state);
}

void RecordedStep::replay(Context& ctx) const {
  BM_CHECK(graph_ != nullptr, "replay of a step that was not recorded");
  cuda::replay(ctx.state, graph_);
}

SideQueue::SideQueue(Context& main) : main_(main), context_(main) {
  if (main.device != Device::kCuda) return;
  queue_ = cuda::create_side_queue();
  context_.scratch = nullptr;
  context_.state = nullptr;
  context_.stream = cuda::side_stream(queue_);
  context_.comm_clock = nullptr;
}

SideQueue::~SideQueue() {
  if (queue_) cuda::destroy_side_queue(queue_);
}

void SideQueue::fork() {
  if (queue_) cuda::fork_side_queue(main_.state, queue_);
}

void SideQueue::mark(size_t point) {
  if (queue_) cuda::mark_side_queue(queue_, point);
}

void SideQueue::join(size_t point) {
  if (queue_) cuda::join_side_queue(main_.state, queue_, point);
}

DeviceTimer::DeviceTimer(Context& ctx) : ctx_(ctx) {
  if (ctx_.device != Device::kCuda) return;
  begin_ = cuda::create_event();
  end_ = cuda::create_event();
}

DeviceTimer::~DeviceTimer() {
  if (begin_) cuda::destroy_event(begin_);
  if (end_) cuda::destroy_event(end_);
}

void DeviceTimer::start() {
  if (begin_) {
    cuda::record_event(ctx_.state, begin_);
  } else {
    begin_seconds_ = now_seconds();
  }
}

void DeviceTimer::stop() {
  if (end_) {
    cuda::record_event(ctx_.state, end_);
  } else {
    end_seconds_ = now_seconds();
  }
}

double DeviceTimer::elapsed_ms_sync() {
  return begin_ ? cuda::elapsed_ms_sync(begin_, end_) : (end_seconds_ - begin_seconds_) * 1e3;
}

int64_t device_sync_calls() {
  return cuda::sync_calls();
}

int64_t device_reservations() {
  return cuda::reservations();
}

}  // namespace biomoe
