#pragma once

#include <cstdint>
#include <vector>

#include "tests/ref/gradient_check.h"

namespace biomoe::ref {

struct ExpertSizes {
  int64_t in = 0;
  int64_t out = 0;
  std::vector<int64_t> offsets;  // [E + 1]
};

// visit(x element, w element, y element) for every product of the three grouped operations.
template <typename Visit>
void for_each_expert_product(const ExpertSizes& sizes, const Visit& visit) {
  for (size_t e = 0; e + 1 < sizes.offsets.size(); ++e) {
    for (int64_t row = sizes.offsets[e]; row < sizes.offsets[e + 1]; ++row) {
      for (int64_t o = 0; o < sizes.out; ++o) {
        for (int64_t i = 0; i < sizes.in; ++i) {
          visit(static_cast<size_t>(row * sizes.in + i),
                static_cast<size_t>((static_cast<int64_t>(e) * sizes.out + o) * sizes.in + i),
                static_cast<size_t>(row * sizes.out + o));
        }
      }
    }
  }
}

inline Vector grouped_forward(const ExpertSizes& sizes, const Vector& x, const Vector& w) {
  Vector y(static_cast<size_t>(sizes.offsets.back() * sizes.out), 0.0);
  for_each_expert_product(sizes,
                          [&](size_t of_x, size_t of_w, size_t of_y) { y[of_y] += x[of_x] * w[of_w]; });
  return y;
}

inline Vector grouped_dgrad(const ExpertSizes& sizes, const Vector& dy, const Vector& w) {
  Vector dx(static_cast<size_t>(sizes.offsets.back() * sizes.in), 0.0);
  for_each_expert_product(sizes,
                          [&](size_t of_x, size_t of_w, size_t of_y) { dx[of_x] += dy[of_y] * w[of_w]; });
  return dx;
}

// Added to dw.
inline Vector grouped_wgrad(const ExpertSizes& sizes, const Vector& dy, const Vector& x, Vector dw) {
  for_each_expert_product(sizes,
                          [&](size_t of_x, size_t of_w, size_t of_y) { dw[of_w] += dy[of_y] * x[of_x]; });
  return dw;
}

}  // namespace biomoe::ref
