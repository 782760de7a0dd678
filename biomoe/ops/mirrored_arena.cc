#include "biomoe/ops/mirrored_arena.h"

#include "biomoe/ops/device.h"

namespace biomoe {

MirroredArena::MirroredArena(Device device, size_t capacity_bytes, const char* name)
    : device_(device), device_arena_(capacity_bytes, name, device_memory(device)) {
  if (device != Device::kCpu) host_arena_ = Arena(capacity_bytes, name, staging_memory(device));
}

TensorView MirroredArena::tensor(DType dtype, Shape shape) {
  const TensorView view = device_arena_.tensor(dtype, shape);
  if (device_ != Device::kCpu) host_arena_.tensor(dtype, shape);  // the same offset on both sides
  return view;
}

TensorView MirroredArena::host(const TensorView& device_view) const {
  if (device_ == Device::kCpu) return device_view;
  TensorView view = device_view;
  const auto offset = static_cast<const uint8_t*>(device_view.data) - device_arena_.base();
  view.data = host_arena_.base() + offset;
  return view;
}

void MirroredArena::push(Context& ctx) {
  if (device_ != Device::kCpu)
    copy_to_device(ctx, device_arena_.base(), host_arena_.base(), device_arena_.used());
}

void MirroredArena::pull(Context& ctx) {
  if (device_ != Device::kCpu)
    copy_to_host(ctx, host_arena_.base(), device_arena_.base(), device_arena_.used());
}

}  // namespace biomoe
