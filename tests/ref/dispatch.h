#pragma once

#include <cstdint>
#include <numeric>

#include "tests/ref/gradient_check.h"

namespace biomoe::ref {

// The slots in order of expert, equal experts in order of slot.
inline std::vector<int32_t> slots_by_expert(const std::vector<int32_t>& experts) {
  std::vector<int32_t> slots(experts.size());
  std::iota(slots.begin(), slots.end(), 0);
  std::stable_sort(slots.begin(), slots.end(), [&](int32_t a, int32_t b) {
    return experts[static_cast<size_t>(a)] < experts[static_cast<size_t>(b)];
  });
  return slots;
}

inline Vector permute(const Vector& x, const std::vector<int32_t>& slot_of_row, size_t top_k, size_t width) {
  Vector y;
  for (int32_t slot : slot_of_row) {
    for (size_t i = 0; i < width; ++i) y.push_back(x.at(static_cast<size_t>(slot) / top_k * width + i));
  }
  return y;
}

// The transpose of permute.
inline Vector unpermute(const Vector& y, const std::vector<int32_t>& slot_of_row, size_t top_k,
                        size_t width) {
  Vector x(y.size() / top_k, 0.0);
  for (size_t row = 0; row < slot_of_row.size(); ++row) {
    const size_t token = static_cast<size_t>(slot_of_row[row]) / top_k;
    for (size_t i = 0; i < width; ++i) x.at(token * width + i) += y.at(row * width + i);
  }
  return x;
}

}  // namespace biomoe::ref
