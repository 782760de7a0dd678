#include "biomoe/moe/routing_stats.h"

#include "biomoe/ops/fill.h"

namespace biomoe {

void reset_routing_stats(Context& ctx, RoutingStats& stats) {
  for (const TensorView& view : {stats.counts_LE, stats.prob_sums_LE, stats.z_sums_L})
    fill_zero(ctx, {.x = view});
  stats.tokens = 0;
}

RoutingStats allocate_routing_stats(TensorAllocator& allocator, int64_t layers, int64_t experts) {
  RoutingStats stats;
  stats.counts_LE = allocator.tensor(DType::kI64, {layers, experts});
  stats.prob_sums_LE = allocator.tensor(DType::kF64, {layers, experts});
  stats.z_sums_L = allocator.tensor(DType::kF64, {layers});
  return stats;
}

}  // namespace biomoe
