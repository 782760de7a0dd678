#pragma once

#include <cstdint>

#include "tests/ref/gradient_check.h"

namespace biomoe::ref {

struct AdamwState {
  double param = 0.0;
  double exp_avg = 0.0;
  double exp_avg_sq = 0.0;
};

struct AdamwRule {
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
};

// Algorithm 2 of Loshchilov and Hutter (2019), with the schedule folded into lr.
inline AdamwState adamw(AdamwState state, double grad, const AdamwRule& rule, int64_t step) {
  state.param -= rule.lr * rule.weight_decay * state.param;
  state.exp_avg = rule.beta1 * state.exp_avg + (1.0 - rule.beta1) * grad;
  state.exp_avg_sq = rule.beta2 * state.exp_avg_sq + (1.0 - rule.beta2) * grad * grad;
  const double mean = state.exp_avg / (1.0 - std::pow(rule.beta1, static_cast<double>(step)));
  const double mean_sq = state.exp_avg_sq / (1.0 - std::pow(rule.beta2, static_cast<double>(step)));
  state.param -= rule.lr * mean / (std::sqrt(mean_sq) + rule.eps);
  return state;
}

}  // namespace biomoe::ref
