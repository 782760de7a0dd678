// Softmax cross-entropy over a chunk of rows, and its gradient in place.
#pragma once

#include "biomoe/core/tensor_view.h"
#include "biomoe/ops/op_list.h"

namespace biomoe {

// nll[t] = logsumexp(logits[t]) - logits[t, target] (0 where the target is below 0 or its weight is 0);
// with write_gradient: logits[t] = weight[t] * grad_scale * (softmax(logits[t]) - onehot(target)), 0 where
// ignored. Ignored rows are never read, so that a NaN there cannot reach the loss.
struct CrossEntropyArgs {
  TensorView logits_TV;  // read, and overwritten when write_gradient
  TensorView targets_T;  // i32; ids in [0, V) or negative
  TensorView weights_T;  // f32
  TensorView nll_T;      // f32, assigned (unweighted)
  double grad_scale = 1.0;
  bool write_gradient = false;
};

}  // namespace biomoe
