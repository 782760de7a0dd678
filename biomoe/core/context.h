// Context: where an operation runs and what it may use; the first argument of every op.
#pragma once

#include "biomoe/core/arena.h"

namespace biomoe {

enum class Device : uint8_t { kCpu, kCuda };

struct Context {
  Device device = Device::kCpu;
  int num_threads = 1;       // CPU threads; results are bitwise the same for a fixed number
  Arena* scratch = nullptr;  // memory an op may use during its call (see each op's *_scratch_bytes)
  void* stream = nullptr;    // device stream, null on the CPU
};

}  // namespace biomoe
