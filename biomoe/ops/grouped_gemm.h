// One product per expert over expert-ordered rows, as one operation.
#pragma once

#include "biomoe/core/tensor_view.h"
#include "biomoe/ops/op_list.h"

namespace biomoe {

// Rows [offsets[e], offsets[e+1]) of x and y belong to expert e; w[e] is [out, in]. Experts without rows are
// legal.
//   grouped_gemm_forward: y[rows e]  = x[rows e] w[e]^T      y assigned
//   grouped_gemm_dgrad:   x[rows e]  = y[rows e] w[e]        x assigned (x and y hold gradients)
//   grouped_gemm_wgrad:   w[e]      += y[rows e]^T x[rows e] w accumulated (y and w hold gradients)
struct GroupedGemmArgs {
  TensorView x_NI;        // [N, in]
  TensorView w_EOI;       // [E, out, in]
  TensorView y_NO;        // [N, out]
  TensorView offsets_E1;  // i64
};

}  // namespace biomoe
