// WeightUpdate: the update that a step leaves to the one after it, and what is done beside the passes: on the
// CPU the update itself and the gradients' norm, between ranks on GPUs what they exchange of gradients and
// weights.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "biomoe/dist/mesh.h"
#include "biomoe/model/model.h"
#include "biomoe/ops/device.h"
#include "biomoe/optim/optimizer.h"
#include "biomoe/train/piece_list.h"
#include "biomoe/train/shard_exchange.h"

namespace biomoe {

// A step ends with the gradients and their norm, and the step after it begins with the update. So the weights
// that a rank updated go to the others beside the forward pass, each stage's until it reaches the stage, as
// gradients are summed beside the backward pass once a stage is through. On the CPU, where both the update
// and the norm wait for memory and one thread takes all that memory gives, one thread does them beside the
// products of the others: of the stages to come in the forward pass, and of those that are through in the
// backward pass. The numbers are those of an update made at once.
class WeightUpdate {
 public:
  // `mesh`: null for a rank that is alone.
  WeightUpdate(Model& model, Optimizer& optimizer, const Mesh* mesh);
  ~WeightUpdate();
  WeightUpdate(const WeightUpdate&) = delete;
  WeightUpdate& operator=(const WeightUpdate&) = delete;

  // One a parameter: the codes that updates write, see Model::start_step.
  std::span<const WeightCodes> codes() const { return codes_; }

  // In a step, in this order: begin; before_forward of each stage; after_backward of each stage, where its
  // gradients are complete; finish_backward; clip; and leave.
  void begin();
  void before_forward(int64_t stage);
  void after_backward(int64_t stage);
  void finish_backward();
  void clip(double max_norm);
  void leave();

  // Outside of steps: makes the update that was left, if any.
  void settle();

 private:
  Optimizer::UpdateArgs args() const;
  bool copied(int64_t stage) const { return model_.parameters().region(stage).copies > 1; }
  void list_pieces();
  void update_stages(bool of_copied);
  void share_device(bool shared);

  Model& model_;
  Optimizer& optimizer_;
  const Mesh* mesh_;
  std::vector<WeightCodes> codes_;
  SideQueue queue_;
  int64_t last_copied_ = -1;  // the last stage of which other ranks hold copies
  int multiprocessors_ = 0;   // of the GPU, where there is such a stage
  // On the CPU, of the regions that this rank alone holds; else empty.
  PieceList updates_, squares_;
  std::unique_ptr<ShardExchange> shards_;  // where ranks shard parameters: what they exchange instead
};

}  // namespace biomoe
