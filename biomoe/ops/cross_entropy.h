// Softmax cross-entropy over a chunk of rows, and its gradient in place; sums of the loss.
#pragma once

#include "biomoe/core/tensor_view.h"
#include "biomoe/ops/op_list.h"

namespace biomoe {

// nll[t] = logsumexp(logits[t]) - logits[t, target] (0 where the target is below 0 or its weight is 0);
// with write_gradient: logits[t] = weight[t] * grad_scale * (softmax(logits[t]) - onehot(target)), 0 where
// ignored. Ignored rows are never read, so that a NaN there cannot reach the loss.
struct CrossEntropyArgs {
  TensorView logits_TV;       // read, and overwritten when write_gradient
  TensorView targets_T;       // i32; ids in [0, V) or negative
  TensorView weights_T;       // f32
  TensorView nll_T;           // f32, assigned (unweighted)
  TensorView grad_scale_1{};  // f64, for write_gradient; in memory of the device, as every number that
                              // changes from step to step, so that a recorded step can be replayed
  bool write_gradient = false;
};

// sums += {sum of weight * nll, sum of nll, count} over the rows with a weight other than 0, in an order that
// does not depend on the number of threads.
struct LossSumsArgs {
  TensorView nll_T;      // f32
  TensorView weights_T;  // f32
  TensorView sums_3;     // f64, ACCUMULATED
};

}  // namespace biomoe
