// Weights for the tests of MxWeights: of several sizes, most of whose squares have no run that differs, and
// with what makes runs differ.
#pragma once

#include <cmath>
#include <vector>

#include "biomoe/core/rng.h"
#include "biomoe/core/tensor_view.h"

namespace biomoe::test {

// Squares of 32 x 32 along a row: fewer than a tile of a GPU's kernel has, one more, and two tiles.
inline const std::vector<Shape> kMxWeightShapes = {{1, 32, 32}, {2, 64, 96}, {1, 96, 544}, {3, 32, 1024}};

inline std::vector<double> mx_weight_values(const Shape& shape) {
  const Rng rng(5, RngStream::kTest);
  const int64_t in = shape[2];
  std::vector<double> values(static_cast<size_t>(shape.num_elements()));
  for (size_t i = 0; i < values.size(); ++i) values[i] = 0.02 * rng.normal(i);
  // One that all others of its blocks are small beside; in the last square, so that there are others without.
  const auto at = [&](int64_t row, int64_t column) -> double& {
    return values[static_cast<size_t>((shape[0] * shape[1] - 32 + row) * in + in - 32 + column)];
  };
  at(3, 7) = 3000.0;
  at(3, 8) = -1e-7;
  at(5, 7) = 0.0;
  at(9, 30) = NAN;
  at(10, 31) = INFINITY;
  at(11, 2) = -447.0 * 0x1p-9;  // saturates where scales are rounded down
  at(11, 3) = 0x1.fffep-2;
  for (int64_t i = 0; i < 32; ++i) at(31, i) = 0.0;
  return values;
}

}  // namespace biomoe::test
