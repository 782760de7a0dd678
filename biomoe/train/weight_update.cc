#include "biomoe/train/weight_update.h"

#include <algorithm>

#include "biomoe/dist/gpus.h"
#include "biomoe/ops/comm_clock.h"
#include "biomoe/optim/replicas.h"

namespace biomoe {
namespace {

constexpr int64_t kPieceElements = 64 * 1024;  // of an update: 1.8 MB read and written

}  // namespace

WeightUpdate::WeightUpdate(Model& model, Optimizer& optimizer, const Mesh* mesh)
    : model_(model),
      optimizer_(optimizer),
      mesh_(mesh),
      codes_(model.weight_codes().begin(), model.weight_codes().end()),
      queue_(model.context()),
      updates_([this](Context& ctx, const PieceList::Piece& piece) {
        optimizer_.update(ctx, args(), piece.stage, piece.part);
      }),
      squares_([this](Context& ctx, const PieceList::Piece& piece) {
        optimizer_.add_squares(ctx, model_.gradients_A(), piece.stage, piece.segment);
      }) {
  for (size_t parameter = 0; parameter < codes_.size(); ++parameter) {
    if (!optimizer.writes_codes(parameter)) codes_[parameter] = {};
  }
  for (int64_t stage = 0; stage < model.parameters().num_stages(); ++stage)
    if (copied(stage)) last_copied_ = stage;
  if (model.limits().device == Device::kCpu) {
    list_pieces();
  } else if (last_copied_ >= 0) {
    multiprocessors_ = device_info(model.limits().device).multiprocessors;
  }
  if (model.parameters().shards()) shards_ = std::make_unique<ShardExchange>(model, *mesh, queue_);
}

WeightUpdate::~WeightUpdate() {
  model_.context().side_work = nullptr;
}

void WeightUpdate::list_pieces() {
  const int64_t stages = model_.parameters().num_stages();
  for (int64_t stage = 0; stage < stages; ++stage) {
    if (copied(stage)) continue;
    const auto segments = optimizer_.segments(stage);
    for (size_t i = 0; i < segments.size(); ++i) {
      const ArenaSegment& all = segments[i];
      for (int64_t done = 0; done < all.count; done += kPieceElements) {
        const ArenaSegment part{all.begin + done, std::min(kPieceElements, all.count - done), all.decay};
        updates_.add({stage, i, part});
      }
    }
  }
  for (int64_t stage = stages - 1; stage >= 0; --stage) {
    if (copied(stage)) continue;
    for (size_t i = 0; i < optimizer_.segments(stage).size(); ++i) squares_.add({stage, i, {}});
  }
}

Optimizer::UpdateArgs WeightUpdate::args() const {
  return {.weights_A = model_.weights_A(), .gradients_A = model_.gradients_A(), .codes = codes_};
}

// Of the stages of which other ranks hold copies, or of the others.
void WeightUpdate::update_stages(bool of_copied) {
  for (int64_t stage = 0; stage < model_.parameters().num_stages(); ++stage) {
    if (copied(stage) != of_copied) continue;
    optimizer_.update(model_.context(), args(), stage);
    if (!of_copied || shards_) continue;
    queue_.fork();
    gather_weights(queue_.context(), *mesh_, model_.parameters().region(stage), model_.weights_A());
    queue_.mark(static_cast<size_t>(stage));
  }
}

// While the queue's kernels hold some of the multiprocessors.
void WeightUpdate::share_device(bool shared) {
  Context& ctx = model_.context();
  ctx.multiprocessors = shared && ctx.device != Device::kCpu ? multiprocessors_ - nccl::kBlocksBeside : 0;
}

void WeightUpdate::begin() {
  update_stages(true);  // first what other ranks wait for
  if (updates_.empty()) update_stages(false);
  if (shards_) shards_->weights_changed();
  share_device(last_copied_ >= 0);
  updates_.restart();
  updates_.open_all();
  squares_.restart();
}

void WeightUpdate::before_forward(int64_t stage) {
  Context& ctx = model_.context();
  if (!updates_.empty()) {
    ctx.side_work = nullptr;
    updates_.finish(ctx, stage);
    ctx.side_work = &updates_;
  }
  if (shards_ || !copied(stage)) return;
  {
    const CommSpan span(ctx);
    queue_.join(static_cast<size_t>(stage));
  }
  if (stage == last_copied_) share_device(false);
}

void WeightUpdate::after_backward(int64_t stage) {
  squares_.open_stage(stage);
  if (!squares_.empty()) model_.context().side_work = &squares_;
  if (shards_ || !copied(stage)) return;
  share_device(true);
  queue_.fork();
  reduce_gradients(queue_.context(), *mesh_, model_.parameters().region(stage), model_.gradients_A());
}

void WeightUpdate::finish_backward() {
  model_.context().side_work = nullptr;
  if (last_copied_ < 0) return;
  const CommSpan span(model_.context());
  queue_.mark(0);
  queue_.join(0);
  share_device(false);
}

void WeightUpdate::clip(double max_norm) {
  Context& ctx = model_.context();
  const TensorView gradients_A = model_.gradients_A(), loss_sums_3 = model_.loss_sums_3();
  if (squares_.empty())
    return optimizer_.clip(ctx, gradients_A, max_norm, loss_sums_3, model_.gradient_squares());
  const int64_t stages = model_.parameters().num_stages();
  squares_.finish(ctx, stages);
  BM_CHECK(updates_.done() && squares_.done(), "a pass left out a stage");
  for (int64_t stage = 0; stage < stages; ++stage)
    if (copied(stage)) optimizer_.add_squares(ctx, gradients_A, stage);
  optimizer_.finish_clip(ctx, max_norm, loss_sums_3);
}

void WeightUpdate::leave() {
  // After a step that was replayed nobody knows here what is in the rooms.
  if (shards_) shards_->weights_changed();
  model_.set_update_due(true);
}

void WeightUpdate::settle() {
  if (!model_.update_due()) return;
  Context& ctx = model_.context();
  optimizer_.update(ctx, args());
  if (mesh_ && !shards_) {
    for (const ArenaRegion& region : model_.parameters().regions()) {
      if (region.copies > 1) gather_weights(ctx, *mesh_, region, model_.weights_A());
    }
  }
  model_.set_update_due(false);
}

}  // namespace biomoe
