// Context: where an operation runs and what it may use; the first argument of every op.
#pragma once

#include "biomoe/core/arena.h"
#include "biomoe/core/side_work.h"

namespace biomoe {

enum class Device : uint8_t { kCpu, kCuda };

// A stream, library handles and their plans; what is in it is the backend's (see ops/device.h).
struct DeviceState;
class CommClock;

struct Context {
  Device device = Device::kCpu;
  int num_threads = 1;            // CPU threads; results are bitwise the same for a fixed number
  Arena* scratch = nullptr;       // memory of the device that an op may use during its call (*_scratch_bytes)
  DeviceState* state = nullptr;   // null on the CPU, and for a side queue, whose ops need none
  void* stream = nullptr;         // of the state, for what other libraries give to the device: cudaStream_t
  bool deterministic = false;     // on the GPU: bitwise equal runs (the CPU's always are)
  bool portable_kernels = false;  // on the GPU: none that only some of those this program runs on have
  int multiprocessors = 0;        // of the GPU that kernels which fill it may count on; 0: all
  SideWork* side_work = nullptr;  // CPU: what a thread may do beside operations
  CommClock* comm_clock = nullptr;  // where set, it times communication between ranks (ops/comm_clock.h)
};

}  // namespace biomoe
