// Token embedding: a row look-up and its gradient.
#pragma once

#include "biomoe/core/context.h"
#include "biomoe/core/tensor_view.h"
#include "biomoe/ops/op_list.h"

namespace biomoe {

// y[t] = weight[tokens[t]]. Every token id must be in [0, V): checked on the CPU.
struct EmbeddingForwardArgs {
  TensorView tokens_T;  // i32
  TensorView weight_VD;
  TensorView y_TD;  // assigned
};

// dweight[v] = sum of dy[t] over tokens[t] = v (0 where there is none), added to dweight where accumulate;
// summed in an order that does not depend on the number of threads.
struct EmbeddingBackwardArgs {
  TensorView tokens_T;  // i32
  TensorView dy_TD;
  TensorView dweight_VD;  // assigned, or added to
  bool accumulate = false;
};

// Bytes of ctx.scratch that embedding_backward takes.
size_t embedding_backward_scratch_bytes(Device device, int64_t tokens, int64_t vocabulary, int64_t width);

}  // namespace biomoe
