// ShardExchange: brings the parameters of a stage together from the ranks that hold parts of them, and shares
// out its gradients (ZeRO-3, Rajbhandari et al. 2020).
#pragma once

#include <vector>

#include "biomoe/dist/mesh.h"
#include "biomoe/model/model.h"
#include "biomoe/ops/device.h"

namespace biomoe {

// Exchanges run on `queue`, beside the passes: the weights of the next stage while one is computed, the sums
// of gradients while backward goes on. All ranks make the same passes.
class ShardExchange : public StageShards {
 public:
  // All must outlive this; the model is given this and gives it up at the end.
  ShardExchange(Model& model, const Mesh& mesh, SideQueue& queue);
  ~ShardExchange() override;
  ShardExchange(const ShardExchange&) = delete;
  ShardExchange& operator=(const ShardExchange&) = delete;

  void before_forward(int64_t stage) override;
  void before_backward(int64_t stage, bool accumulate) override;
  void after_backward(int64_t stage) override;
  void keep_weights(int64_t stage) override;
  void weights_changed() override;

 private:
  // A region's place in the model's arenas, which several stages take in turns.
  struct Room {
    int64_t begin = 0;
    int64_t weights_of = -1;       // stage whose weights are there, or on their way
    bool weights_waited = false;   // the passes already wait for them
    bool gradients_leave = false;  // the last stage's gradients are still being summed
  };
  bool sharded(int64_t stage) const;
  Room& room_of(int64_t stage);
  size_t gather_point(int64_t stage) const { return room_index_[static_cast<size_t>(stage)]; }
  size_t reduce_point(int64_t stage) const { return rooms_.size() + gather_point(stage); }
  const ArenaRegion& region(int64_t stage) const;
  void send_for(int64_t stage);
  void need(int64_t stage, int64_t direction);

  Model& model_;
  const Mesh& mesh_;
  SideQueue& queue_;
  std::vector<Room> rooms_;
  std::vector<size_t> room_index_;  // by stage
};

}  // namespace biomoe
