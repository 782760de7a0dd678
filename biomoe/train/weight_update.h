// WeightUpdate: the update of the weights that a step leaves to the one after it.
#pragma once

#include <span>
#include <vector>

#include "biomoe/dist/mesh.h"
#include "biomoe/model/model.h"
#include "biomoe/ops/device.h"
#include "biomoe/optim/optimizer.h"

namespace biomoe {

// A step ends with the gradients and their norm. The step after it begins with the update, made for each
// stage of the model before its forward pass reads the weights: then a part of it can run beside the forward
// pass of the stages before, on a few multiprocessors, and so can the weights' way to other ranks. The
// numbers are those of an update made at once.
class WeightUpdate {
 public:
  // `mesh`: null for a rank that is alone.
  WeightUpdate(Model& model, Optimizer& optimizer, const Mesh* mesh);

  // One a parameter: the codes that updates write, see Model::start_step.
  std::span<const WeightCodes> codes() const { return codes_; }

  // Sets aside what a step of so many tokens makes beside its forward pass.
  void plan(int64_t tokens);
  double beside_share() const;  // of the elements that this rank updates

  // In a step, in this order: begin; before_forward of each stage; after gradients and norm are there, leave.
  void begin();
  void before_forward(int64_t stage);
  void leave();

  // Outside of steps: makes the update that was left, if any.
  void settle();

 private:
  Optimizer::UpdateArgs args() const;

  Model& model_;
  Optimizer& optimizer_;
  const Mesh* mesh_;
  std::vector<WeightCodes> codes_;
  SideQueue beside_;
  int multiprocessors_;  // of the device
  std::vector<int64_t> beside_elements_;  // by stage
  int64_t last_beside_ = -1;              // stage; -1 for none
  int64_t planned_tokens_ = -1;
  bool left_ = false;
};

}  // namespace biomoe
