#pragma once

#include <cstdint>

#include "tests/ref/gradient_check.h"

namespace biomoe::ref {

struct RopeShape {
  int64_t tokens;
  int64_t row_width;
  int64_t num_heads;
  int64_t head_dim;
};

// The angle of a pair is position * theta^(-2i/K), here in double throughout.
inline Vector rope(const Vector& x, const std::vector<int32_t>& positions, double theta,
                   const RopeShape& shape, bool inverse = false) {
  Vector y = x;
  const int64_t half = shape.head_dim / 2;
  for (int64_t t = 0; t < shape.tokens; ++t) {
    for (int64_t head = 0; head < shape.num_heads; ++head) {
      for (int64_t i = 0; i < half; ++i) {
        const double frequency =
            std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(shape.head_dim));
        const double angle = (inverse ? -1.0 : 1.0) * positions[static_cast<size_t>(t)] * frequency;
        const auto first = static_cast<size_t>(t * shape.row_width + head * shape.head_dim + i);
        const size_t second = first + static_cast<size_t>(half);
        y[first] = x[first] * std::cos(angle) - x[second] * std::sin(angle);
        y[second] = x[second] * std::cos(angle) + x[first] * std::sin(angle);
      }
    }
  }
  return y;
}

}  // namespace biomoe::ref
