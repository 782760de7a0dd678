// Token embedding: a row look-up and its gradient.
#pragma once

#include "biomoe/core/tensor_view.h"
#include "biomoe/ops/op_list.h"

namespace biomoe {

// y[t] = weight[tokens[t]]. Every token id must be in [0, V): checked on the CPU.
struct EmbeddingForwardArgs {
  TensorView tokens_T;  // i32
  TensorView weight_VD;
  TensorView y_TD;  // assigned
};

// dweight[tokens[t]] += dy[t], summed in order of t whatever the number of threads.
struct EmbeddingBackwardArgs {
  TensorView tokens_T;  // i32
  TensorView dy_TD;
  TensorView dweight_VD;  // accumulated
};

}  // namespace biomoe
