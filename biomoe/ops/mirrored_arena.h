// A small arena that the host and a device both hold, for what they tell each other once a step.
#pragma once

#include <span>

#include "biomoe/core/arena.h"
#include "biomoe/core/context.h"

namespace biomoe {

// On the CPU both sides are one memory and push and pull do nothing.
class MirroredArena : public TensorAllocator {
 public:
  MirroredArena() = default;
  MirroredArena(Device device, size_t capacity_bytes, const char* name);

  TensorView tensor(DType dtype, Shape shape) override;  // the device's side
  TensorView host(const TensorView& device_view) const;  // the same tensor on the host's side

  // Copies in order with the operations of ctx; after pull the host's side is valid once ctx has been waited
  // for, and before push is written again it must have run.
  void push(Context& ctx);
  void pull(Context& ctx);

 private:
  Device device_ = Device::kCpu;
  Arena device_arena_;
  Arena host_arena_;  // unused on the CPU
};

}  // namespace biomoe
