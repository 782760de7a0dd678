#pragma once

#include <cstdint>

#include "tests/ref/gradient_check.h"

namespace biomoe::ref {

struct GemmSizes {
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t inner = 0;
};

// op(a) op(b), row-major and without padding.
inline Vector gemm(const GemmSizes& sizes, const Vector& a, bool transpose_a, const Vector& b,
                   bool transpose_b) {
  Vector c;
  for (int64_t i = 0; i < sizes.rows; ++i) {
    for (int64_t j = 0; j < sizes.columns; ++j) {
      double sum = 0.0;
      for (int64_t l = 0; l < sizes.inner; ++l) {
        const int64_t of_a = transpose_a ? l * sizes.rows + i : i * sizes.inner + l;
        const int64_t of_b = transpose_b ? j * sizes.inner + l : l * sizes.columns + j;
        sum += a[static_cast<size_t>(of_a)] * b[static_cast<size_t>(of_b)];
      }
      c.push_back(sum);
    }
  }
  return c;
}

}  // namespace biomoe::ref
