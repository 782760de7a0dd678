#include "biomoe/train/train_step.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "biomoe/dist/watchdog.h"

namespace biomoe {

StepRunner::StepRunner(Model& model, Optimizer& optimizer, bool record, const Mesh* mesh, double wait_limit_s)
    : model_(model),
      optimizer_(optimizer),
      record_(record && RecordedStep::supported(model.context())),
      wait_limit_s_(wait_limit_s),
      mesh_(mesh && !mesh->alone() ? mesh : nullptr),
      weight_update_(model, optimizer, mesh_) {}

void StepRunner::submit(std::span<const Batch> micro_batches, const StepSettings& settings) {
  micro_batches_ = micro_batches;
  settings_ = settings;
  result_ = {};
  uploaded_.clear();
  sizes_.clear();
  double target_weight = 0;
  if (settings.poison_activations) model_.poison_activations();
  for (size_t i = 0; i < micro_batches.size(); ++i) {
    const DeviceBatch& batch = model_.upload(micro_batches[i], static_cast<int64_t>(i));
    uploaded_.push_back(&batch);
    sizes_.push_back(batch.num_tokens());
    sizes_.push_back(batch.cu_seqlens_B1.shape[0]);
    target_weight += micro_batches[i].target_weight;
    result_.tokens += batch.num_tokens();
  }
  if (mesh_) {
    std::array<double, 2> sums{target_weight, static_cast<double>(result_.tokens)};
    Context host;
    mesh_->world().all_reduce(host, TensorView(sums.data(), DType::kF64, Shape{2}), ReduceOp::kSum,
                              "the size of the global batch");
    target_weight = sums[0];
    result_.tokens = static_cast<int64_t>(sums[1]);
    sizes_.push_back(result_.tokens);  // auxiliary losses are divided by it
  }
  grad_scale_ = target_weight > 0 ? 1.0 / target_weight : 0.0;
  model_.start_step(grad_scale_, weight_update_.codes());
  optimizer_.start_step(model_.context(), settings.lr);
  if (!record_) {
    enqueue(uploaded_, settings.max_grad_norm);
    return;
  }
  // The first step of its sizes runs as it is, for libraries to choose their kernels.
  const auto [entry, first] = recordings_.try_emplace(sizes_);
  if (first) {
    enqueue(uploaded_, settings.max_grad_norm);
    return;
  }
  Context& ctx = model_.context();
  if (!entry->second) {
    RecordedStep::begin(ctx);
    try {
      enqueue(uploaded_, settings.max_grad_norm);
    } catch (...) {
      RecordedStep::abandon(ctx);
      throw;
    }
    entry->second = RecordedStep::end(ctx);
  }
  entry->second->replay(ctx);
  weight_update_.leave();
  model_.set_routed_tokens(result_.tokens);
}

void StepRunner::enqueue(std::span<const DeviceBatch* const> batches, double max_grad_norm) {
  const ModelConfig& config = model_.config();
  model_.reset_sums();
  // The routing of the whole global batch is known before the first backward, or nothing there depends on it.
  const bool several = batches.size() > 1;
  const bool count_ahead = several && (config.router_aux_loss_coef > 0 || config.router_z_loss_coef > 0);
  const auto share_routing = [this] {
    if (mesh_) model_.share_routing(mesh_->world(), result_.tokens);
  };
  const StageHooks updating{
      .before_forward = [this](int64_t stage) { weight_update_.before_forward(stage); }};
  const StageHooks reducing{
      .after_backward = [this](int64_t stage) { weight_update_.after_backward(stage); }};
  weight_update_.begin();
  if (count_ahead) {
    for (const DeviceBatch* batch : batches)
      model_.count_routing(*batch, batch == batches.front() ? updating : StageHooks());
    share_routing();
  }
  bool accumulate = false;
  for (const DeviceBatch* batch : batches) {
    model_.forward(*batch, !count_ahead, count_ahead || accumulate ? StageHooks() : updating);
    model_.loss(*batch, true, accumulate);
    if (!several) share_routing();
    model_.backward(*batch, config.router_aux_loss_coef, config.router_z_loss_coef, accumulate,
                    batch == batches.back() ? reducing : StageHooks());
    accumulate = true;
  }
  if (several && !count_ahead) share_routing();
  if (mesh_) {
    model_.share_losses(mesh_->world());
    model_.share_amax(mesh_->world());
  }
  model_.finish_step(config.router_aux_loss_coef);
  weight_update_.finish_backward();
  weight_update_.clip(max_grad_norm);
  optimizer_.finish_step(model_.context());
  weight_update_.leave();
}

// On a GPU the ranks first see on their hosts that all have given out the step: one that has not is named by
// those who wait for it here, and what all have given out ends by itself.
void StepRunner::wait_sync() {
  if (!mesh_ || model_.context().device == Device::kCpu) return device_wait_sync(model_.context());
  const Comm& world = mesh_->world();
  mesh_->world().barrier("the start of the step");
  if (device_wait_sync(model_.context(), wait_limit_s_)) return;
  give_up(fmt::format("rank {}: the step's work on the GPU did not complete within {:.3g} s", world.rank(),
                      wait_limit_s_));
}

StepResult StepRunner::finish_sync() {
  wait_sync();
  const StepSums sums = model_.sums();
  if (!optimizer_.update_made()) throw_nonfinite(sums);
  const ModelConfig& config = model_.config();
  result_.lm_loss = sums.loss.weighted_nll * grad_scale_;
  result_.nats_per_target =
      sums.loss.targets > 0 ? sums.loss.nll / static_cast<double>(sums.loss.targets) : 0.0;
  result_.targets = sums.loss.targets;
  result_.aux_loss = sums.balance_loss;
  result_.z_loss = sums.z_loss;
  result_.loss = result_.lm_loss + config.router_aux_loss_coef * result_.aux_loss +
                 config.router_z_loss_coef * result_.z_loss;
  result_.grad_norm = optimizer_.gradient_norm();
  return result_;
}

// The update that the step left changes nothing, so the micro-batches' forwards can be run again to find the
// place.
void StepRunner::throw_nonfinite(const StepSums& sums) {
  settle();
  optimizer_.set_steps(optimizer_.steps() - 1);
  if (!std::isfinite(sums.loss.weighted_nll) || !std::isfinite(sums.loss.nll)) {
    const std::string place = nonfinite_place();
    throw failure("step {}: the loss is not finite; the first value that is not is in {}. No update was made",
                  settings_.step, place.empty() ? "the head" : place);
  }
  const std::string parameter = optimizer_.first_nonfinite();
  throw failure("step {}: the gradient of {} is not finite. No update was made", settings_.step,
                parameter.empty() ? "the global norm" : parameter);
}

// All ranks run all of their micro-batches, for the sake of the experts' rows of others.
std::string StepRunner::nonfinite_place() {
  std::string place;
  for (size_t i = 0; i < micro_batches_.size() && (mesh_ || place.empty()); ++i) {
    model_.forward(model_.upload(micro_batches_[i], static_cast<int64_t>(i)), false);
    if (place.empty()) place = model_.first_nonfinite_sync();
  }
  if (!mesh_) return place;
  for (const std::string& found : all_gather_text(mesh_->world(), place, "the place that is not finite")) {
    if (!found.empty()) return found;
  }
  return "";
}

StepResult train_step(Model& model, Optimizer& optimizer, std::span<const Batch> micro_batches,
                      const StepSettings& settings, const Mesh* mesh) {
  StepRunner runner(model, optimizer, false, mesh);
  runner.submit(micro_batches, settings);
  const StepResult result = runner.finish_sync();
  runner.settle();
  return result;
}

double step_flops(const ModelConfig& config, const ParameterList& parameters, const Batch& batch) {
  int64_t matmul = 0;
  for (const auto& spec : parameters.specs()) {
    const bool look_up = spec.kind == ParamKind::kEmbedding && !config.tie_word_embeddings;
    if (look_up || spec.kind == ParamKind::kNorm) continue;
    matmul += spec.kind == ParamKind::kExpert
                  ? spec.num_elements() * spec.parts / config.num_local_experts * config.num_experts_per_tok
                  : spec.num_elements();
  }
  double pairs = 0;
  for (size_t b = 0; b + 1 < batch.cu_seqlens.size(); ++b) {
    const auto length = static_cast<double>(batch.cu_seqlens[b + 1] - batch.cu_seqlens[b]);
    const double window =
        config.sliding_window ? std::min(length, static_cast<double>(*config.sliding_window)) : length;
    pairs += window * (window + 1) / 2 + (length - window) * window;
  }
  const double attention = 3.0 * 4.0 * pairs *
                           static_cast<double>(config.num_attention_heads * config.key_width()) *
                           static_cast<double>(config.num_hidden_layers);
  return 6.0 * static_cast<double>(matmul) * static_cast<double>(batch.num_tokens()) + attention;
}

}  // namespace biomoe
