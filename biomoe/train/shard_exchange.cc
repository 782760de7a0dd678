#include "biomoe/train/shard_exchange.h"

#include "biomoe/ops/comm_clock.h"
#include "biomoe/ops/fill.h"
#include "biomoe/optim/replicas.h"

namespace biomoe {

ShardExchange::ShardExchange(Model& model, const Mesh& mesh, SideQueue& queue)
    : model_(model), mesh_(mesh), queue_(queue) {
  for (const ArenaRegion& region : model.parameters().regions()) {
    size_t room = 0;
    while (room < rooms_.size() && rooms_[room].begin != region.held) ++room;
    if (room == rooms_.size()) rooms_.push_back({.begin = region.held});
    room_index_.push_back(room);
  }
  model.set_shards(this);
}

ShardExchange::~ShardExchange() {
  model_.set_shards(nullptr);
}

const ArenaRegion& ShardExchange::region(int64_t stage) const {
  return model_.parameters().region(stage);
}

bool ShardExchange::sharded(int64_t stage) const {
  return stage >= 0 && stage < model_.parameters().num_stages() && region(stage).copies > 1;
}

ShardExchange::Room& ShardExchange::room_of(int64_t stage) {
  return rooms_[gather_point(stage)];
}

// After what the passes were given so far, which was the last to read the room.
void ShardExchange::send_for(int64_t stage) {
  Room& room = room_of(stage);
  if (room.weights_of == stage) return;
  queue_.fork();
  gather_weights(queue_.context(), mesh_, region(stage), model_.weights_A());
  queue_.mark(gather_point(stage));
  room.weights_of = stage;
  room.weights_waited = false;
}

// The weights of `stage` now, and those of the next in the direction of the pass soon.
void ShardExchange::need(int64_t stage, int64_t direction) {
  if (sharded(stage)) {
    send_for(stage);
    Room& room = room_of(stage);
    if (!room.weights_waited) {
      const CommSpan span(model_.context());
      queue_.join(gather_point(stage));
      room.weights_waited = true;
    }
  }
  int64_t next = stage + direction;
  while (next >= 0 && next < model_.parameters().num_stages() && !sharded(next)) next += direction;
  if (sharded(next)) send_for(next);
}

void ShardExchange::before_forward(int64_t stage) {
  need(stage, 1);
}

void ShardExchange::before_backward(int64_t stage, bool accumulate) {
  // Backward of the embedding reads no weights.
  if (stage > 0) need(stage, -1);
  if (!sharded(stage)) return;
  Context& ctx = model_.context();
  Room& room = room_of(stage);
  if (room.gradients_leave) {
    const CommSpan span(ctx);
    queue_.join(reduce_point(stage));
    room.gradients_leave = false;
  }
  if (!accumulate) return;
  // What this rank has summed so far goes into the sum again; the others' parts of the room add nothing.
  const ArenaRegion& own = region(stage);
  const TensorView gradients_A = model_.gradients_A();
  fill_zero(ctx, {.x = gradients_A.rows(own.held, own.count)});
  const TensorView sum = gradients_A.rows(own.own, own.owned_count());
  copy_on_device(ctx, gradients_A.rows(own.held_own(), own.owned_count()).data, sum.data, sum.bytes());
}

void ShardExchange::after_backward(int64_t stage) {
  if (!sharded(stage)) return;
  queue_.fork();
  reduce_gradients(queue_.context(), mesh_, region(stage), model_.gradients_A());
  queue_.mark(reduce_point(stage));
  room_of(stage).gradients_leave = true;
}

void ShardExchange::keep_weights(int64_t stage) {
  if (!sharded(stage)) return;
  const ArenaRegion& own = region(stage);
  const TensorView weights_A = model_.weights_A();
  const TensorView kept = weights_A.rows(own.own, own.owned_count());
  copy_on_device(model_.context(), kept.data, weights_A.rows(own.held_own(), own.owned_count()).data,
                 kept.bytes());
}

// Between passes, when nothing is on its way.
void ShardExchange::weights_changed() {
  for (Room& room : rooms_) {
    room.weights_of = -1;
    room.gradients_leave = false;
  }
}

}  // namespace biomoe
