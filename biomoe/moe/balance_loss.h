// The router's auxiliary losses, over all layers and the whole global batch.
#pragma once

#include <cstdint>

#include "biomoe/core/arena.h"

namespace biomoe {

// Sums over the tokens routed so far, for each layer. They add up over micro-batches and ranks, so the losses
// below have one value however the global batch is split. Padding never enters: packed batches hold none.
struct RoutingStats {
  TensorView counts_LE;     // i64: (token, slot) pairs sent to each expert
  TensorView prob_sums_LE;  // f64: summed router probabilities
  TensorView z_sums_L;      // f64: summed squared logsumexp
  int64_t tokens = 0;       // tokens routed (the same for every layer)

  void reset();
};

RoutingStats allocate_routing_stats(TensorAllocator& allocator, int64_t layers, int64_t experts);

// Switch-style load balancing (Fedus et al., 2021) as `transformers` computes it for Mixtral: the routers of
// all layers are read as one,  E * sum_e f_e P_e  with f_e the (token, slot) pairs at expert e and P_e the
// summed probability of e, both divided by layers * tokens. Unscaled by its coefficient. 0 when nothing was
// routed.
double load_balancing_loss(const RoutingStats& stats);

// ST-MoE's router z-loss (Zoph et al., 2022): mean over layers and tokens of logsumexp(logits)^2. Unscaled.
double router_z_loss(const RoutingStats& stats);

// d(coef * load_balancing_loss)/d(probability of expert e, any token and layer), f_e held constant: [E] f32,
// assigned.
void load_balancing_gradient(const RoutingStats& stats, double coef, TensorView balance_E);

}  // namespace biomoe
