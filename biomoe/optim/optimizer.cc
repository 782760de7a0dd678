#include "biomoe/optim/optimizer.h"

#include <algorithm>
#include <cmath>

namespace biomoe {

size_t Optimizer::planned_bytes(const ParameterList& parameters) {
  const size_t moment = align_up(static_cast<size_t>(parameters.arena_elements()) * sizeof(float));
  return 2 * moment + align_up(parameters.specs().size() * sizeof(double));
}

Optimizer::Optimizer(const ParameterList& parameters, const AdamwConfig& config)
    : parameters_(parameters), config_(config), arena_(planned_bytes(parameters), "optimiser state") {
  config_.validate();
  exp_avg_A_ = arena_.tensor(DType::kF32, {parameters.arena_elements()});
  exp_avg_sq_A_ = arena_.tensor(DType::kF32, {parameters.arena_elements()});
  sums_ = arena_.tensor(DType::kF64, {static_cast<int64_t>(parameters.specs().size())});
  for (const auto& spec : parameters.specs()) {
    segments_.push_back(
        {spec.offset, spec.num_elements(), spec.kind != ParamKind::kNorm || config.decay_norms});
  }
}

double Optimizer::gradient_norm(Context& ctx, TensorView gradients_A, std::string* nonfinite) {
  sum_squares(ctx, {.x_A = gradients_A, .segments = segments_, .sums_S = sums_});
  double total = 0;
  for (size_t i = 0; i < segments_.size(); ++i) {
    const double sum = sums_.f64()[i];
    if (nonfinite && nonfinite->empty() && !std::isfinite(sum)) *nonfinite = parameters_.specs()[i].name;
    total += sum;
  }
  return std::sqrt(total);
}

void Optimizer::update(Context& ctx, TensorView weights_A, TensorView gradients_A, double lr,
                       double grad_scale) {
  ++steps_;
  adamw(ctx, {.param_A = weights_A,
              .grad_A = gradients_A,
              .exp_avg_A = exp_avg_A_,
              .exp_avg_sq_A = exp_avg_sq_A_,
              .segments = segments_,
              .lr = lr,
              .beta1 = config_.betas[0],
              .beta2 = config_.betas[1],
              .eps = config_.eps,
              .weight_decay = config_.weight_decay,
              .grad_scale = grad_scale,
              .step = steps_});
}

double clip_factor(double norm, double max_norm) {
  return max_norm > 0 ? std::min(1.0, max_norm / (norm + 1e-6)) : 1.0;
}

}  // namespace biomoe
