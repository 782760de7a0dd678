// Central finite differences, for checking the references' own gradients in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

namespace biomoe::ref {

using Vector = std::vector<double>;

inline double dot(const Vector& a, const Vector& b) {
  double sum = 0.0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// The largest difference between `gradient` and the finite differences of f at x, in units of the largest
// component of either (1 at least).
inline double gradient_error(const std::function<double(const Vector&)>& f, const Vector& x,
                             const Vector& gradient) {
  constexpr double kStep = 1e-5;
  if (gradient.size() != x.size()) return INFINITY;
  double scale = 1.0;
  double error = 0.0;
  Vector moved = x;
  for (size_t i = 0; i < x.size(); ++i) {
    moved[i] = x[i] + kStep;
    const double above = f(moved);
    moved[i] = x[i] - kStep;
    const double below = f(moved);
    moved[i] = x[i];
    const double slope = (above - below) / (2.0 * kStep);
    if (!(std::abs(slope - gradient[i]) < INFINITY)) return INFINITY;
    scale = std::max({scale, std::abs(slope), std::abs(gradient[i])});
    error = std::max(error, std::abs(slope - gradient[i]));
  }
  return error / scale;
}

inline constexpr double kGradientTolerance = 1e-8;

}  // namespace biomoe::ref
