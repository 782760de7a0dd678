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
      copied_(static_cast<size_t>(model.parameters().num_stages())),
      multiprocessors_(device_info(model.limits().device).multiprocessors),
      updates_([this](Context& ctx, const PieceList::Piece& piece) {
        optimizer_.update(ctx, args(), piece.region, piece.part);
      }),
      squares_([this](Context& ctx, const PieceList::Piece& piece) {
        optimizer_.add_squares(ctx, model_.gradients_A(), piece.region, piece.segment);
      }) {
  for (size_t parameter = 0; parameter < codes_.size(); ++parameter) {
    if (!optimizer.writes_codes(parameter)) codes_[parameter] = {};
  }
  for (const ArenaRegion& region : model.parameters().regions()) {
    if (region.copies == 1) continue;
    copied_[static_cast<size_t>(region.stage)] = true;
    last_copied_ = region.stage;
  }
  if (model.limits().device == Device::kCpu) list_pieces();
  if (model.parameters().shards()) shards_ = std::make_unique<ShardExchange>(model, *mesh, queue_);
}

WeightUpdate::~WeightUpdate() {
  model_.context().side_work = nullptr;
}

void WeightUpdate::list_pieces() {
  const auto& regions = model_.parameters().regions();
  for (size_t region = 0; region < regions.size(); ++region) {
    if (regions[region].copies > 1) continue;
    const auto segments = optimizer_.segments(region);
    for (size_t i = 0; i < segments.size(); ++i) {
      const ArenaSegment& all = segments[i];
      for (int64_t done = 0; done < all.count; done += kPieceElements) {
        const ArenaSegment part{all.begin + done, std::min(kPieceElements, all.count - done), all.decay};
        updates_.add({regions[region].stage, region, i, part});
      }
    }
  }
  for (size_t region = regions.size(); region-- > 0;) {
    if (regions[region].copies > 1) continue;
    for (size_t i = 0; i < optimizer_.segments(region).size(); ++i)
      squares_.add({regions[region].stage, region, i, {}});
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
    if (!copied || shards_) continue;
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
  if (updates_.empty()) update_regions(false);
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
    updates_.finish(ctx, [stage](int64_t of) { return of <= stage; });
    ctx.side_work = &updates_;
  }
  if (shards_ || !copied_[static_cast<size_t>(stage)]) return;
  {
    const CommSpan span(ctx);
    queue_.join(static_cast<size_t>(stage));
  }
  if (stage == last_copied_) share_device(false);
}

void WeightUpdate::after_backward(int64_t stage) {
  squares_.open_stage(stage);
  if (!squares_.empty()) model_.context().side_work = &squares_;
  if (shards_ || !copied_[static_cast<size_t>(stage)]) return;
  share_device(true);
  queue_.fork();
  for (const ArenaRegion& region : model_.parameters().regions()) {
    if (region.stage == stage && region.copies > 1)
      reduce_gradients(queue_.context(), *mesh_, region, model_.gradients_A());
  }
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
  const auto& regions = model_.parameters().regions();
  squares_.finish(ctx, [](int64_t) { return true; });
  BM_CHECK(updates_.done() && squares_.done(), "a pass left out a stage");
  for (size_t region = 0; region < regions.size(); ++region) {
    if (squares_.empty() || regions[region].copies > 1)
      optimizer_.add_squares(ctx, model_.gradients_A(), region, model_.gradient_squares());
  }
  optimizer_.finish_clip(ctx, max_norm, model_.loss_sums_3());
}

void WeightUpdate::leave() {
  // After a step that was replayed nobody knows here what is in the rooms.
  if (shards_) shards_->weights_changed();
  left_ = true;
  model_.set_update_due(true);
}

void WeightUpdate::settle() {
  if (!left_) return;
  Context& ctx = model_.context();
  optimizer_.update(ctx, args());
  if (mesh_ && !shards_) {
    for (const ArenaRegion& region : model_.parameters().regions()) {
      if (region.copies > 1) gather_weights(ctx, *mesh_, region, model_.weights_A());
    }
  }
  left_ = false;
  model_.set_update_due(false);
}

}  // namespace biomoe
