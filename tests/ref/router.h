#pragma once

#include <cstdint>
#include <numeric>

#include "tests/ref/gradient_check.h"

namespace biomoe::ref {

struct Routing {
  Vector probs;                  // [T, E]
  std::vector<int32_t> experts;  // [T, k]
  Vector weights;                // [T, k]
  Vector lse;                    // [T]
};

// `chosen` fixes the experts (for derivatives, which do not move the selection); empty = select.
inline Routing route(const Vector& logits, size_t num_experts, size_t top_k,
                     const std::vector<int32_t>& chosen = {}) {
  Routing out;
  for (size_t t = 0; t < logits.size() / num_experts; ++t) {
    const double* row = logits.data() + t * num_experts;
    double sum = 0.0;
    const double largest = *std::max_element(row, row + num_experts);
    for (size_t e = 0; e < num_experts; ++e) sum += std::exp(row[e] - largest);
    out.lse.push_back(largest + std::log(sum));
    for (size_t e = 0; e < num_experts; ++e) out.probs.push_back(std::exp(row[e] - largest) / sum);
    std::vector<int32_t> order(num_experts);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return row[a] > row[b]; });
    double selected = 0.0;
    for (size_t j = 0; j < top_k; ++j) {
      out.experts.push_back(chosen.empty() ? order[j] : chosen[t * top_k + j]);
      selected += out.probs[t * num_experts + static_cast<size_t>(out.experts.back())];
    }
    for (size_t j = 0; j < top_k; ++j) {
      out.weights.push_back(out.probs[t * num_experts + static_cast<size_t>(out.experts[t * top_k + j])] /
                            selected);
    }
  }
  return out;
}

struct RouterLoss {
  Vector dweights;  // [T, k]
  Vector balance;   // [E]
  double z_scale;
};

inline double router_loss(const Routing& routing, const RouterLoss& loss) {
  double value = dot(routing.weights, loss.dweights);
  for (size_t i = 0; i < routing.probs.size(); ++i) {
    value += routing.probs[i] * loss.balance[i % loss.balance.size()];
  }
  for (double lse : routing.lse) value += loss.z_scale * lse * lse;
  return value;
}

// Step by step through the renormalisation and the Jacobian of the softmax.
inline Vector router_backward(const Vector& logits, size_t num_experts, const std::vector<int32_t>& experts,
                              size_t top_k, const RouterLoss& loss) {
  const Routing routing = route(logits, num_experts, top_k, experts);
  Vector dlogits(logits.size(), 0.0);
  for (size_t t = 0; t < routing.lse.size(); ++t) {
    const double* probs = routing.probs.data() + t * num_experts;
    Vector dprobs = loss.balance;
    double selected = 0.0;
    for (size_t j = 0; j < top_k; ++j) selected += probs[experts[t * top_k + j]];
    for (size_t j = 0; j < top_k; ++j) {
      for (size_t m = 0; m < top_k; ++m) {  // d (p_m / S) / d p_j = [m = j] / S - p_m / S^2
        const double direct = m == j ? 1.0 / selected : 0.0;
        dprobs[static_cast<size_t>(experts[t * top_k + j])] +=
            loss.dweights[t * top_k + m] * (direct - probs[experts[t * top_k + m]] / (selected * selected));
      }
    }
    for (size_t e = 0; e < num_experts; ++e) {
      for (size_t f = 0; f < num_experts; ++f) {  // d p_f / d logit_e = p_f ([e = f] - p_e)
        dlogits[t * num_experts + e] += dprobs[f] * probs[f] * ((e == f ? 1.0 : 0.0) - probs[e]);
      }
      dlogits[t * num_experts + e] += 2.0 * loss.z_scale * routing.lse[t] * probs[e];
    }
  }
  return dlogits;
}

}  // namespace biomoe::ref
