// RMSNorm (Zhang and Sennrich, 2019) with the residual addition that precedes it in a transformer block.
#pragma once

#include "biomoe/core/context.h"
#include "biomoe/core/tensor_view.h"
#include "biomoe/ops/op_list.h"

namespace biomoe {

// sum = x + residual (or x when residual is absent); y = weight * sum / sqrt(mean(sum^2) + eps).
struct RmsNormForwardArgs {
  TensorView x_TD;
  TensorView residual_TD;  // optional
  TensorView weight_D;
  TensorView sum_TD;  // assigned; required when residual is given, may be x or residual itself (in place)
  TensorView y_TD;    // assigned
  TensorView rstd_T;  // f32, assigned: 1 / sqrt(mean(sum^2) + eps)
  double eps = 1e-5;
};

// dx = d/dsum of y, plus dresidual (the gradient that reaches `sum` by the other path) when given.
struct RmsNormBackwardArgs {
  TensorView dy_TD;
  TensorView sum_TD;
  TensorView weight_D;
  TensorView rstd_T;
  TensorView dresidual_TD;  // optional, may be dx itself
  TensorView dx_TD;         // assigned
  TensorView dweight_D;  // assigned, or added to; in an order that does not depend on the number of threads
  bool accumulate = false;  // dweight
};

// Bytes of ctx.scratch that rms_norm_backward takes.
size_t rms_norm_backward_scratch_bytes(Device device, int64_t tokens, int64_t width);
namespace cpu {
size_t rms_norm_backward_scratch_bytes(int64_t tokens, int64_t width);
}

}  // namespace biomoe
