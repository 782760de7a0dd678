// AdamW over the model's flat arenas, with global-norm clipping and the finite check before it.
#pragma once

#include <string>
#include <vector>

#include "biomoe/core/arena.h"
#include "biomoe/core/context.h"
#include "biomoe/model/parameters.h"
#include "biomoe/ops/adamw.h"
#include "biomoe/optim/optim_config.h"

namespace biomoe {

class Optimizer {
 public:
  // Reserves both moments (zero). Throws user_error for a value out of range.
  Optimizer(const ParameterList& parameters, const AdamwConfig& config);
  static size_t planned_bytes(const ParameterList& parameters);

  // Global norm of the gradients, over all parameters. When it is not finite, `nonfinite` gets the name of
  // the first parameter at fault.
  double gradient_norm(Context& ctx, TensorView gradients_A, std::string* nonfinite = nullptr);

  // One update from gradients * grad_scale; counts the step.
  void update(Context& ctx, TensorView weights_A, TensorView gradients_A, double lr, double grad_scale);

  TensorView exp_avg_A() const { return exp_avg_A_; }
  TensorView exp_avg_sq_A() const { return exp_avg_sq_A_; }
  int64_t steps() const { return steps_; }
  void set_steps(int64_t steps) { steps_ = steps; }

 private:
  const ParameterList& parameters_;
  AdamwConfig config_;
  std::vector<ArenaSegment> segments_;  // one a parameter
  Arena arena_;
  TensorView exp_avg_A_, exp_avg_sq_A_, sums_;
  int64_t steps_ = 0;
};

// As torch.nn.utils.clip_grad_norm_: 1, or max_norm / (norm + 1e-6) when the norm is larger. max_norm = 0: no
// clipping.
double clip_factor(double norm, double max_norm);

}  // namespace biomoe
