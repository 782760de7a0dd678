// Sums behind the router's auxiliary losses (ops/router.h: balance_loss).
#pragma once

#include <cstdint>

#include "biomoe/core/arena.h"
#include "biomoe/core/context.h"

namespace biomoe {

// Sums over the tokens routed so far, for each layer. They add up over micro-batches and ranks, so the losses
// have one value however the global batch is split. Padding never enters: packed batches hold none.
struct RoutingStats {
  TensorView counts_LE;     // i64: (token, slot) pairs sent to each expert
  TensorView prob_sums_LE;  // f64: summed router probabilities
  TensorView z_sums_L;      // f64: summed squared logsumexp
  int64_t tokens = 0;       // tokens routed (the same for every layer)
};

void reset_routing_stats(Context& ctx, RoutingStats& stats);

RoutingStats allocate_routing_stats(TensorAllocator& allocator, int64_t layers, int64_t experts);

}  // namespace biomoe
