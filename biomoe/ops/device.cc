#include "biomoe/ops/device.h"

#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

namespace biomoe {
namespace {

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void copy(Context& ctx, void* to, const void* from, size_t bytes) {
  if (bytes == 0 || to == from) return;
  if (ctx.device == Device::kCpu) {
    std::memcpy(to, from, bytes);
  } else {
    cuda::copy(ctx.state, to, from, bytes);
  }
}

}  // namespace

bool device_available(Device device, std::string* why) {
  return device == Device::kCpu || cuda::available(why);
}

DeviceInfo device_info(Device device) {
  if (device == Device::kCuda) return cuda::info();
  DeviceInfo info;
  info.name = "CPU";
  info.multiprocessors = static_cast<int>(std::thread::hardware_concurrency());
  return info;
}

MemorySource& device_memory(Device device) {
  return device == Device::kCpu ? host_memory() : cuda::memory();
}

MemorySource& staging_memory(Device device) {
  return device == Device::kCpu ? host_memory() : cuda::staging();
}

DeviceHandle::DeviceHandle(Device device) : state_(device == Device::kCpu ? nullptr : cuda::create_state()) {}

DeviceHandle::~DeviceHandle() {
  if (state_) cuda::destroy_state(state_);
}

DeviceHandle::DeviceHandle(DeviceHandle&& other) noexcept : state_(std::exchange(other.state_, nullptr)) {}

DeviceHandle& DeviceHandle::operator=(DeviceHandle&& other) noexcept {
  std::swap(state_, other.state_);
  return *this;
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

RecordedStep::~RecordedStep() {
  if (graph_) cuda::destroy_recording(graph_);
}

RecordedStep::RecordedStep(RecordedStep&& other) noexcept : graph_(std::exchange(other.graph_, nullptr)) {}

RecordedStep& RecordedStep::operator=(RecordedStep&& other) noexcept {
  std::swap(graph_, other.graph_);
  return *this;
}

void RecordedStep::begin(Context& ctx) {
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
  cuda::replay(ctx.state, graph_);
}

DeviceTimer::DeviceTimer(Context& ctx) : ctx_(ctx) {
  if (ctx.device == Device::kCpu) return;
  begin_ = cuda::create_event();
  end_ = cuda::create_event();
}

DeviceTimer::~DeviceTimer() {
  if (begin_) cuda::destroy_event(begin_);
  if (end_) cuda::destroy_event(end_);
}

void DeviceTimer::start() {
  begin_seconds_ = now_seconds();
  if (begin_) cuda::record_event(ctx_.state, begin_);
}

void DeviceTimer::stop() {
  end_seconds_ = now_seconds();
  if (end_) cuda::record_event(ctx_.state, end_);
}

double DeviceTimer::elapsed_ms_sync() {
  return begin_ ? cuda::elapsed_ms_sync(begin_, end_) : (end_seconds_ - begin_seconds_) * 1e3;
}

int64_t device_sync_calls() {
  return cuda::sync_calls();
}

}  // namespace biomoe
