#pragma once

#include "tests/ref/gradient_check.h"

namespace biomoe::ref {

inline Vector scaled_swiglu(const Vector& gate_up, const Vector& probs, size_t width) {
  Vector act;
  for (size_t row = 0; row < probs.size(); ++row) {
    for (size_t i = 0; i < width; ++i) {
      const double gate = gate_up.at(row * 2 * width + i);
      const double up = gate_up.at(row * 2 * width + width + i);
      act.push_back(gate / (1.0 + std::exp(-gate)) * up * probs[row]);
    }
  }
  return act;
}

struct ScaledSwigluGradients {
  Vector dgate_up;
  Vector dprobs;
};

inline ScaledSwigluGradients scaled_swiglu_backward(const Vector& dact, const Vector& gate_up,
                                                    const Vector& probs, size_t width) {
  ScaledSwigluGradients out{Vector(gate_up.size()), Vector(probs.size(), 0.0)};
  for (size_t row = 0; row < probs.size(); ++row) {
    for (size_t i = 0; i < width; ++i) {
      const size_t at = row * 2 * width + i;
      const double gate = gate_up[at];
      const double up = gate_up[at + width];
      const double sigmoid = 1.0 / (1.0 + std::exp(-gate));
      const double slope = dact[row * width + i];
      out.dprobs[row] += slope * gate * sigmoid * up;
      out.dgate_up[at] = slope * probs[row] * up * (sigmoid + gate * sigmoid * (1.0 - sigmoid));
      out.dgate_up[at + width] = slope * probs[row] * gate * sigmoid;
    }
  }
  return out;
}

}  // namespace biomoe::ref
