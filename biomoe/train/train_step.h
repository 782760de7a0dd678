// One update from the micro-batches of a global batch.
#pragma once

#include <map>
#include <optional>
#include <span>
#include <vector>

#include "biomoe/data/batch.h"
#include "biomoe/dist/mesh.h"
#include "biomoe/model/model.h"
#include "biomoe/ops/device.h"
#include "biomoe/optim/optimizer.h"
#include "biomoe/train/weight_update.h"

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
  double nats_per_target = 0;  // unweighted mean nll of targets with a weight other than 0
  double aux_loss = 0;         // load-balancing loss, unscaled
  double z_loss = 0;           // unscaled
  double grad_norm = 0;        // before clipping
  int64_t tokens = 0;
  int64_t targets = 0;
};

// Runs updates. Gradients of all micro-batches are summed and divided by the target weight of the whole, so
// the update does not depend on how the global batch is split. The load-balancing gradient needs the expert
// counts of the whole before the first backward: with more than one micro-batch the routers run once ahead
// (one more forward, without the head).
class StepRunner {
 public:
  // record: where the device can, a step is recorded the second time that its sizes are met, and replayed
  // from then on.
  // `mesh`, where there is one: every rank makes the same calls with micro-batches of its own, as many as the
  // others; the global batch is all of them, and the result is the same on all ranks. It must outlive this. A
  // step on GPUs that takes longer than wait_limit_s ends the process.
  StepRunner(Model& model, Optimizer& optimizer, bool record, const Mesh* mesh = nullptr,
             double wait_limit_s = 600);

  // Gives the step to the device and does not wait for it (on the CPU: runs it). The batches may be changed
  // on return; on the CPU, and for the message of a step that fails, they are read until finish_sync returns.
  void submit(std::span<const Batch> micro_batches, const StepSettings& settings);

  // Waits. Throws failure, naming step, place or parameter, when the loss or a gradient is not finite: then
  // no update is made.
  StepResult finish_sync();

  // The update of the weights is left to the next submit. Whoever reads the weights or the optimiser's state
  // in between has it made first; given out and not waited for.
  void settle() { weight_update_.settle(); }

 private:
  void enqueue(std::span<const DeviceBatch* const> batches, double max_grad_norm);
  void wait_sync();
  std::string nonfinite_place();
  [[noreturn]] void throw_nonfinite(const StepSums& sums);

  Model& model_;
  Optimizer& optimizer_;
  bool record_ = false;
  double wait_limit_s_;
  const Mesh* mesh_ = nullptr;  // null for a rank that is alone
  WeightUpdate weight_update_;
  std::map<std::vector<int64_t>, std::optional<RecordedStep>>
      recordings_;  // by the sizes of the micro-batches
  std::vector<const DeviceBatch*> uploaded_;
  std::vector<int64_t> sizes_;
  std::span<const Batch> micro_batches_;
  StepSettings settings_;
  StepResult result_;
  double grad_scale_ = 0;
};

// submit, finish_sync and settle of one step that is not recorded.
StepResult train_step(Model& model, Optimizer& optimizer, std::span<const Batch> micro_batches,
                      const StepSettings& settings, const Mesh* mesh = nullptr);

// Floating-point operations of one training step on this batch: 6 per active matmul parameter and token, plus
// causal attention (forward 4 K per head and visible pair, backward twice that).
double step_flops(const ModelConfig& config, const ParameterList& parameters, const Batch& batch);

}  // namespace biomoe
