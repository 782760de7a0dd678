#include "biomoe/optim/optim_config.h"

#include <cmath>
#include <numbers>

#include "biomoe/core/error.h"

namespace biomoe {

void AdamwConfig::validate() const {
  if (!(std::isfinite(lr) && lr >= 0))
    throw user_error("adamw_kwargs.lr={} must be a finite number of at least 0", lr);
  if (betas.size() != 2)
    throw user_error("adamw_kwargs.betas holds {} numbers; give two, as [0.9, 0.95]", betas.size());
  for (double beta : betas) {
    if (!(beta >= 0 && beta < 1))
      throw user_error("adamw_kwargs.betas holds {}; each must be in [0, 1)", beta);
  }
  if (!(std::isfinite(eps) && eps > 0)) throw user_error("adamw_kwargs.eps={} must be above 0", eps);
  if (!(std::isfinite(weight_decay) && weight_decay >= 0)) {
    throw user_error("adamw_kwargs.weight_decay={} must be at least 0", weight_decay);
  }
}

void ScheduleConfig::validate() const {
  if (num_warmup_steps < 0)
    throw user_error("lr_scheduler_kwargs.num_warmup_steps={} is below 0", num_warmup_steps);
  if (num_decay_steps < 0)
    throw user_error("lr_scheduler_kwargs.num_decay_steps={} is below 0", num_decay_steps);
  if (!(min_lr_ratio >= 0 && min_lr_ratio <= 1)) {
    throw user_error("lr_scheduler_kwargs.min_lr_ratio={} is outside [0, 1]", min_lr_ratio);
  }
}

double scheduled_lr(const ScheduleConfig& schedule, double peak_lr, int64_t num_train_steps, int64_t step) {
  const int64_t warmup = schedule.num_warmup_steps;
  if (step < warmup) return peak_lr * static_cast<double>(step + 1) / static_cast<double>(warmup);
  const int64_t decay = schedule.num_decay_steps > 0 ? schedule.num_decay_steps : num_train_steps - warmup;
  if (decay <= 0) return peak_lr;
  const double progress = std::min(1.0, static_cast<double>(step - warmup) / static_cast<double>(decay));
  const double cosine = 0.5 * (1.0 + std::cos(std::numbers::pi * progress));
  return peak_lr * (schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * cosine);
}

}  // namespace biomoe
