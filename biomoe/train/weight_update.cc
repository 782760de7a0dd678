#include "biomoe/train/weight_update.h"

#include "biomoe/dist/gpus.h"
#include "biomoe/ops/comm_clock.h"
#include "biomoe/optim/replicas.h"

namespace biomoe {

WeightUpdate::WeightUpdate(Model& model, Optimizer& optimizer, const Mesh* mesh)
    : model_(model),
      optimizer_(optimizer),
      mesh_(mesh),
      codes_(model.weight_codes().begin(), model.weight_codes().end()),
      queue_(model.context()),
      copied_(static_cast<size_t>(model.parameters().num_stages())),
      multiprocessors_(device_info(model.limits().device).multiprocessors) {
  for (size_t parameter = 0; parameter < codes_.size(); ++parameter) {
    if (!optimizer.writes_codes(parameter)) codes_[parameter] = {};
  }
  for (const ArenaRegion& region : model.parameters().regions()) {
    if (region.copies == 1) continue;
    copied_[static_cast<size_t>(region.stage)] = true;
    last_copied_ = region.stage;
  }
}

Optimizer::UpdateArgs WeightUpdate::args() const {
  return {.weights_A = model_.weights_A(), .gradients_A = model_.gradients_A(), .codes = codes_};
}

// What other ranks wait for comes first.
void WeightUpdate::update_regions(bool copied) {
  const auto& regions = model_.parameters().regions();
  for (size_t i = 0; i < regions.size(); ++i) {
    if ((regions[i].copies > 1) != copied) continue;
    optimizer_.update(model_.context(), args(), i);
    if (!copied) continue;
    const auto stage = static_cast<size_t>(regions[i].stage);
    queue_.fork();
    gather_weights(queue_.context(), *mesh_, regions[i], model_.weights_A());
    queue_.mark(stage);
  }
}

// While the queue's kernels hold some of the multiprocessors.
void WeightUpdate::share_device(bool shared) {
  Context& ctx = model_.context();
  ctx.multiprocessors = shared && ctx.device != Device::kCpu ? multiprocessors_ - nccl::kBlocksBeside : 0;
}

void WeightUpdate::begin() {
  update_regions(true);
  update_regions(false);
  share_device(last_copied_ >= 0);
}

void WeightUpdate::before_forward(int64_t stage) {
  if (!copied_[static_cast<size_t>(stage)]) return;
  {
    const CommSpan span(model_.context());
    queue_.join(static_cast<size_t>(stage));
  }
  if (stage == last_copied_) share_device(false);
}

void WeightUpdate::after_backward(int64_t stage) {
  if (!copied_[static_cast<size_t>(stage)]) return;
  share_device(true);
  queue_.fork();
  for (const ArenaRegion& region : model_.parameters().regions()) {
    if (region.stage == stage && region.copies > 1)
      reduce_gradients(queue_.context(), *mesh_, region, model_.gradients_A());
  }
}

void WeightUpdate::finish_backward() {
  if (last_copied_ < 0) return;
  const CommSpan span(model_.context());
  queue_.mark(0);
  queue_.join(0);
  share_device(false);
}

void WeightUpdate::leave() {
  left_ = true;
  model_.set_update_due(true);
}

void WeightUpdate::settle() {
  if (!left_) return;
  Context& ctx = model_.context();
  optimizer_.update(ctx, args());
  if (mesh_) {
    for (const ArenaRegion& region : model_.parameters().regions()) {
      if (region.copies > 1) gather_weights(ctx, *mesh_, region, model_.weights_A());
    }
  }
  left_ = false;
  model_.set_update_due(false);
}

}  // namespace biomoe
