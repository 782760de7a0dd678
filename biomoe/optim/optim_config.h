// The `adamw_kwargs` and `lr_scheduler_kwargs` sections of a run's configuration.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

namespace biomoe {

// Precision of masters and moments: fp32, or bf16 as torch keeps them for a bf16 model (GPU only).
enum class OptimizerStates : uint8_t { kFp32, kBf16 };
inline constexpr std::array<std::string_view, 2> kOptimizerStatesNames{"fp32", "bf16"};

struct AdamwConfig {
  double lr = 3e-3;
  std::vector<double> betas{0.9, 0.95};
  double eps = 1e-8;
  double weight_decay = 0.033;
  bool decay_norms = false;

  void validate() const;  // throws user_error naming the key

  template <typename Visitor>
  void visit(Visitor& v) {
    v.field("lr", lr, "peak learning rate");
    v.field("betas", betas, "decay of the first and second moment");
    v.field("eps", eps, "added to the root of the second moment");
    v.field("weight_decay", weight_decay, "decoupled weight decay, of matrices only");
    v.field("decay_norms", decay_norms, "weight decay also on the norms' weights");
  }
};

struct ScheduleConfig {
  int64_t num_warmup_steps = 0;
  int64_t num_decay_steps = 0;
  double min_lr_ratio = 0.1;

  void validate() const;

  template <typename Visitor>
  void visit(Visitor& v) {
    v.field("num_warmup_steps", num_warmup_steps, "linear warm-up to the peak");
    v.field("num_decay_steps", num_decay_steps,
            "cosine decay after warm-up; 0: over the rest of num_train_steps");
    v.field("min_lr_ratio", min_lr_ratio,
            "learning rate at the end of the decay and after it, as a part of the peak");
  }
};

// Learning rate of update `step` (from 0): lr * (step + 1) / warmup in warm-up, then a half cosine from lr to
// lr * min_lr_ratio over the decay steps, then constant.
double scheduled_lr(const ScheduleConfig& schedule, double peak_lr, int64_t num_train_steps, int64_t step);

}  // namespace biomoe
