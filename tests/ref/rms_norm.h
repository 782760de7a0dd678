#pragma once

#include "tests/ref/gradient_check.h"

namespace biomoe::ref {

struct RmsNorm {
  Vector y;
  Vector rstd;
};

inline RmsNorm rms_norm(const Vector& sum, const Vector& weight, double eps) {
  const size_t width = weight.size();
  RmsNorm out;
  for (size_t row = 0; row < sum.size(); row += width) {
    double squares = 0.0;
    for (size_t i = 0; i < width; ++i) squares += sum[row + i] * sum[row + i];
    out.rstd.push_back(1.0 / std::sqrt(squares / static_cast<double>(width) + eps));
    for (size_t i = 0; i < width; ++i) out.y.push_back(weight[i] * sum[row + i] * out.rstd.back());
  }
  return out;
}

struct RmsNormGradients {
  Vector dsum;
  Vector dweight;
};

inline RmsNormGradients rms_norm_backward(const Vector& dy, const Vector& sum, const Vector& weight,
                                          double eps) {
  const size_t width = weight.size();
  const Vector rstd = rms_norm(sum, weight, eps).rstd;
  RmsNormGradients out{Vector(sum.size()), Vector(width, 0.0)};
  for (size_t t = 0; t < rstd.size(); ++t) {
    const size_t row = t * width;
    for (size_t i = 0; i < width; ++i) {
      out.dweight[i] += dy[row + i] * sum[row + i] * rstd[t];
      // d y_j / d sum_i = w_j (rstd [i = j] - sum_j sum_i rstd^3 / D)
      double slope = dy[row + i] * weight[i] * rstd[t];
      for (size_t j = 0; j < width; ++j) {
        slope -= dy[row + j] * weight[j] * sum[row + j] * sum[row + i] * rstd[t] * rstd[t] * rstd[t] /
                 static_cast<double>(width);
      }
      out.dsum[row + i] = slope;
    }
  }
  return out;
}

}  // namespace biomoe::ref
