#pragma once

#include <cstdint>

#include "tests/ref/gradient_check.h"

namespace biomoe::ref {

struct CrossEntropy {
  Vector nll;      // 0 where ignored
  Vector dlogits;  // of sum_t weight_t * nll_t
};

inline CrossEntropy cross_entropy(const Vector& logits, const std::vector<int32_t>& targets,
                                  const Vector& weights, size_t vocabulary) {
  CrossEntropy out{Vector(targets.size(), 0.0), Vector(logits.size(), 0.0)};
  for (size_t t = 0; t < targets.size(); ++t) {
    if (targets[t] < 0 || weights[t] == 0.0) continue;
    const double* row = logits.data() + t * vocabulary;
    const double largest = *std::max_element(row, row + vocabulary);
    double sum = 0.0;
    for (size_t v = 0; v < vocabulary; ++v) sum += std::exp(row[v] - largest);
    out.nll[t] = std::log(sum) + largest - row[targets[t]];
    for (size_t v = 0; v < vocabulary; ++v) {
      const double onehot = v == static_cast<size_t>(targets[t]) ? 1.0 : 0.0;
      out.dlogits[t * vocabulary + v] = weights[t] * (std::exp(row[v] - largest) / sum - onehot);
    }
  }
  return out;
}

}  // namespace biomoe::ref
