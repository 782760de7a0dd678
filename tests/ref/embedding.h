#pragma once

#include <cstdint>

#include "tests/ref/gradient_check.h"

namespace biomoe::ref {

inline Vector embedding(const std::vector<int32_t>& tokens, const Vector& weight, int64_t width) {
  Vector y;
  for (int32_t token : tokens) {
    for (int64_t i = 0; i < width; ++i) y.push_back(weight.at(static_cast<size_t>(token * width + i)));
  }
  return y;
}

inline Vector embedding_backward(const std::vector<int32_t>& tokens, const Vector& dy, int64_t vocabulary,
                                 int64_t width) {
  Vector dweight(static_cast<size_t>(vocabulary * width), 0.0);
  for (size_t t = 0; t < tokens.size(); ++t) {
    for (int64_t i = 0; i < width; ++i) {
      dweight.at(static_cast<size_t>(tokens[t] * width + i)) +=
          dy.at(t * static_cast<size_t>(width) + static_cast<size_t>(i));
    }
  }
  return dweight;
}

}  // namespace biomoe::ref
