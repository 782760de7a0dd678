// What a device offers besides operations: memory, copies, waiting, recorded steps. On the CPU device memory
// is host memory, copies are immediate and nothing waits.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "biomoe/core/context.h"

namespace biomoe {

struct DeviceInfo {
  std::string name;
  int compute_capability = 0;  // 10 * major + minor; 0 on the CPU
  int multiprocessors = 0;
  bool mx_products = false;  // products of MX codes run: the GPU and this build have them
  size_t memory_bytes = 0;
  size_t free_bytes = 0;
  // In use now, as the driver tells it: by every program, its own context and kernels included. Memory is
  // planned and nothing is given back while a run goes on, so after its steps this is its peak.
  size_t used_bytes() const { return memory_bytes - free_bytes; }
  std::string driver;  // versions
  std::string runtime;
  std::string bus_id;  // names the GPU on its host
};

// Whether the device can be used; if not, `why` gets one line that says what is missing.
bool device_available(Device device, std::string* why = nullptr);
// Throws user_error with that line.
DeviceInfo device_info(Device device);

// How many of them this process sees; 0 where the device cannot be used.
int64_t device_count(Device device);
// Which of them the calling thread uses from here on; the first where this is not called.
void select_device(Device device, int64_t index);

MemorySource& device_memory(Device device);
// Host memory that the device copies from and to at full speed and without the host waiting.
MemorySource& staging_memory(Device device);

// Owns a DeviceState. One a model.
class DeviceHandle {
 public:
  DeviceHandle() = default;  // the CPU's
  // Throws user_error when the device is not there or is not supported.
  explicit DeviceHandle(Device device);
  ~DeviceHandle();
  DeviceHandle(DeviceHandle&& other) noexcept;
  DeviceHandle& operator=(DeviceHandle&& other) noexcept;
  DeviceState* get() const { return state_; }
  void* stream() const;  // see Context

 private:
  DeviceState* state_ = nullptr;
};

// In either direction, between device memory and host memory, in order with the operations of ctx. `host`
// memory must stay as it is until the copy has run (device_wait_sync), and be of staging_memory for the host
// not to wait.
void copy_to_device(Context& ctx, void* device, const void* host, size_t bytes);
void copy_to_host(Context& ctx, void* host, const void* device, size_t bytes);
void copy_on_device(Context& ctx, void* to, const void* from, size_t bytes);

// Waits until everything given to ctx so far has run; throws failure naming the first error met.
void device_wait_sync(Context& ctx);
// The same for at most so many seconds: whether it has run.
bool device_wait_sync(Context& ctx, double seconds);

// Records the operations given to a context between begin and end, without running them, and replays them as
// one. On the CPU recording is not possible (supported() is false). Move-only.
class RecordedStep {
 public:
  RecordedStep() = default;
  ~RecordedStep();
  RecordedStep(RecordedStep&& other) noexcept;
  RecordedStep& operator=(RecordedStep&& other) noexcept;
  static bool supported(const Context& ctx) { return ctx.device == Device::kCuda; }
  static void begin(Context& ctx);
  static RecordedStep end(Context& ctx);
  // Ends a recording that an error broke off.
  static void abandon(Context& ctx) noexcept;
  void replay(Context& ctx) const;
  explicit operator bool() const { return graph_ != nullptr; }

 private:
  void* graph_ = nullptr;
};

// A second queue of work on a context's device, beside the context's own. On the CPU, which does one thing
// after the other, it is the context's.
class SideQueue {
 public:
  explicit SideQueue(Context& main);
  ~SideQueue();
  SideQueue(const SideQueue&) = delete;
  SideQueue& operator=(const SideQueue&) = delete;

  // For operations that need neither scratch nor a library's handle: those of Comm.
  Context& context() { return queue_ ? context_ : main_; }
  // The queue's work from here on runs after what `main` has been given so far. Once in every step before
  // work is given to it.
  void fork();
  // Remembers what the queue has been given so far as `point`, one of a few small numbers.
  void mark(size_t point);
  // main's work from here on runs after the queue's up to that point. In every step after the queue's last.
  void join(size_t point);

 private:
  Context& main_;
  Context context_;
  void* queue_ = nullptr;
};

// Milliseconds between two points of a context's work. mark() does not wait; elapsed_ms_sync waits for the
// later.
class DeviceTimer {
 public:
  explicit DeviceTimer(Context& ctx);
  ~DeviceTimer();
  DeviceTimer(const DeviceTimer&) = delete;
  DeviceTimer& operator=(const DeviceTimer&) = delete;
  void start();
  void stop();
  double elapsed_ms_sync();

 private:
  Context& ctx_;
  void* begin_ = nullptr;
  void* end_ = nullptr;
  double begin_seconds_ = 0, end_seconds_ = 0;
};

// Calls so far, in this process, that made the host wait for the device.
int64_t device_sync_calls();
// Calls so far, in this process, that reserved device or staging memory.
int64_t device_reservations();

// The same services as a backend defines them (backend/cuda, or backend/no_cuda, which throws).
namespace cuda {
bool available(std::string* why);
int64_t count();
void select(int64_t index);
DeviceInfo info();
MemorySource& memory();
MemorySource& staging();
DeviceState* create_state();
void destroy_state(DeviceState* state) noexcept;
void* stream(DeviceState* state);
void copy(DeviceState* state, void* to, const void* from, size_t bytes);  // direction from the addresses
void wait_sync(DeviceState* state);
bool idle(DeviceState* state);  // everything given to it has run; throws failure naming the first error met
void begin_recording(DeviceState* state);
void* end_recording(DeviceState* state);
void abandon_recording(DeviceState* state) noexcept;
void replay(DeviceState* state, void* graph);
void destroy_recording(void* graph) noexcept;
void* create_event();
void destroy_event(void* event) noexcept;
void record_event(DeviceState* state, void* event);
double elapsed_ms_sync(void* begin, void* end);
int64_t sync_calls();
void* create_side_queue();
void destroy_side_queue(void* queue) noexcept;
void* side_stream(void* queue);
void fork_side_queue(DeviceState* state, void* queue);
void mark_side_queue(void* queue, size_t point);
void join_side_queue(DeviceState* state, void* queue, size_t point);
int64_t reservations();
}  // namespace cuda

}  // namespace biomoe
