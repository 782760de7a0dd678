// One update from the micro-batches of a global batch.
#pragma once

#include <span>

#include "biomoe/data/batch.h"
#include "biomoe/model/model.h"
#include "biomoe/optim/optimizer.h"

namespace biomoe {

struct StepSettings {
  int64_t step = 0;  // from 0, for messages
  double lr = 0;
  double max_grad_norm = 0;
  bool poison_activations = false;
};

struct StepResult {
  double loss = 0;             // weighted mean nll + coefficients * auxiliary losses
  double lm_loss = 0;          // weighted mean nll (0 when no target is valid)
  double nats_per_target = 0;  // unweighted mean nll of targets with a weight above 0
  double aux_loss = 0;         // load-balancing loss, unscaled
  double z_loss = 0;           // unscaled
  double grad_norm = 0;        // before clipping
  int64_t tokens = 0;
  int64_t targets = 0;
};

// Gradients of all micro-batches are summed and divided by the target weight of the whole, so the update does
// not depend on how the global batch is split. The load-balancing gradient needs the expert counts of the
// whole before the first backward: with more than one micro-batch the routers run once ahead (one more
// forward, without the head). Throws failure before the update, naming step, place or parameter, when the
// loss or a gradient is not finite.
StepResult train_step(Model& model, Optimizer& optimizer, std::span<const Batch> micro_batches,
                      const StepSettings& settings);

// Floating-point operations of one training step on this batch: 6 per active matmul parameter and token, plus
// causal attention (forward 4 K per head and visible pair, backward twice that).
double step_flops(const ModelConfig& config, const ParameterList& parameters, const Batch& batch);

}  // namespace biomoe
