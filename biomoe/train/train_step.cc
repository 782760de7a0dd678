#include "biomoe/train/train_step.h"

#include <algorithm>
#include <cmath>

namespace biomoe {

StepResult train_step(Model& model, Optimizer& optimizer, std::span<const Batch> micro_batches,
                      const StepSettings& settings) {
  const ModelConfig& config = model.config();
  double target_weight = 0;
  StepResult result;
  for (const Batch& batch : micro_batches) {
    target_weight += batch.target_weight;
    result.tokens += batch.num_tokens();
  }
  if (settings.poison_activations) model.poison_activations();
  model.zero_gradients();
  model.routing().reset();
  const bool count_ahead =
      micro_batches.size() > 1 && (config.router_aux_loss_coef > 0 || config.router_z_loss_coef > 0);
  if (count_ahead) {
    for (const Batch& batch : micro_batches) model.count_routing(batch);
  }
  const double grad_scale = target_weight > 0 ? 1.0 / target_weight : 0.0;
  LossSums sums;
  for (const Batch& batch : micro_batches) {
    model.forward(batch, !count_ahead);
    const LossSums part = model.loss(batch, true, grad_scale);
    if (!std::isfinite(part.weighted_nll)) {
      const std::string place = model.first_nonfinite();
      throw failure(
          "step {}: the loss is not finite; the first value that is not is in {}. No update was made",
          settings.step, place.empty() ? "the head" : place);
    }
    sums.weighted_nll += part.weighted_nll;
    sums.nll += part.nll;
    sums.targets += part.targets;
    model.backward(batch, config.router_aux_loss_coef, config.router_z_loss_coef);
  }
  result.lm_loss = sums.weighted_nll * grad_scale;
  result.nats_per_target = sums.targets > 0 ? sums.nll / static_cast<double>(sums.targets) : 0.0;
  result.targets = sums.targets;
  result.aux_loss = load_balancing_loss(model.routing());
  result.z_loss = router_z_loss(model.routing());
  result.loss = result.lm_loss + config.router_aux_loss_coef * result.aux_loss +
                config.router_z_loss_coef * result.z_loss;
  std::string nonfinite;
  result.grad_norm = optimizer.gradient_norm(model.context(), model.gradients_A(), &nonfinite);
  if (!std::isfinite(result.grad_norm)) {
    throw failure("step {}: the gradient of {} is not finite. No update was made", settings.step, nonfinite);
  }
  optimizer.update(model.context(), model.weights_A(), model.gradients_A(), settings.lr,
                   clip_factor(result.grad_norm, settings.max_grad_norm));
  return result;
}

double step_flops(const ModelConfig& config, const ParameterList& parameters, const Batch& batch) {
  int64_t matmul = 0;
  for (const auto& spec : parameters.specs()) {
    const bool look_up = spec.kind == ParamKind::kEmbedding && !config.tie_word_embeddings;
    if (look_up || spec.kind == ParamKind::kNorm) continue;
    matmul += spec.kind == ParamKind::kExpert
                  ? spec.num_elements() / config.num_local_experts * config.num_experts_per_tok
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
