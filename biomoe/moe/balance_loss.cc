#include "biomoe/moe/balance_loss.h"

#include <cstring>

namespace biomoe {
namespace {

// layers * tokens: how many routings the sums run over.
double num_routings(const RoutingStats& stats) {
  return static_cast<double>(stats.counts_LE.shape[0]) * static_cast<double>(stats.tokens);
}

// Summed over layers: (token, slot) pairs sent to `expert`.
double expert_count(const RoutingStats& stats, int64_t expert) {
  const int64_t layers = stats.counts_LE.shape[0], experts = stats.counts_LE.shape[1];
  int64_t count = 0;
  for (int64_t layer = 0; layer < layers; ++layer) count += stats.counts_LE.i64()[layer * experts + expert];
  return static_cast<double>(count);
}

}  // namespace

void RoutingStats::reset() {
  for (TensorView* view : {&counts_LE, &prob_sums_LE, &z_sums_L}) std::memset(view->data, 0, view->bytes());
  tokens = 0;
}

RoutingStats allocate_routing_stats(TensorAllocator& allocator, int64_t layers, int64_t experts) {
  RoutingStats stats;
  stats.counts_LE = allocator.tensor(DType::kI64, {layers, experts});
  stats.prob_sums_LE = allocator.tensor(DType::kF64, {layers, experts});
  stats.z_sums_L = allocator.tensor(DType::kF64, {layers});
  return stats;
}

double load_balancing_loss(const RoutingStats& stats) {
  if (stats.tokens == 0) return 0.0;
  const int64_t layers = stats.counts_LE.shape[0], experts = stats.counts_LE.shape[1];
  const double routings = num_routings(stats);
  double loss = 0;
  for (int64_t e = 0; e < experts; ++e) {
    double prob_sum = 0;
    for (int64_t layer = 0; layer < layers; ++layer)
      prob_sum += stats.prob_sums_LE.f64()[layer * experts + e];
    loss += expert_count(stats, e) / routings * (prob_sum / routings);
  }
  return loss * static_cast<double>(experts);
}

double router_z_loss(const RoutingStats& stats) {
  if (stats.tokens == 0) return 0.0;
  double sum = 0;
  for (int64_t layer = 0; layer < stats.z_sums_L.shape[0]; ++layer) sum += stats.z_sums_L.f64()[layer];
  return sum / num_routings(stats);
}

void load_balancing_gradient(const RoutingStats& stats, double coef, TensorView balance_E) {
  const int64_t experts = stats.counts_LE.shape[1];
  const double routings = num_routings(stats);
  for (int64_t e = 0; e < experts; ++e) {
    balance_E.f32()[e] = stats.tokens == 0
                             ? 0.0f
                             : static_cast<float>(coef * static_cast<double>(experts) *
                                                  expert_count(stats, e) / (routings * routings));
  }
}

}  // namespace biomoe
