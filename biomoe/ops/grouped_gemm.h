// One product per expert over expert-ordered rows, as one operation.
#pragma once

#include "biomoe/core/context.h"
#include "biomoe/core/tensor_view.h"
#include "biomoe/ops/op_list.h"
#include "biomoe/ops/scaled_codes.h"

namespace biomoe {

// Rows [offsets[e], offsets[e+1]) of x and y belong to expert e, rows from offsets[E] to R to nobody: they
// are neither read nor written. w[e] is [out, in]. Experts without rows are legal.
//   grouped_gemm_forward: y[rows e]  = x[rows e] w[e]^T      y assigned
//   grouped_gemm_dgrad:   x[rows e]  = y[rows e] w[e]        x assigned (x and y hold gradients)
//   grouped_gemm_wgrad:   w[e]       = y[rows e]^T x[rows e] w assigned, or added to where accumulate (y and
//   w
//                                                            hold gradients; w may be f32 beside bf16 x and
//                                                            y)
struct GroupedGemmArgs {
  TensorView x_RI;          // [R, in]
  TensorView w_EOI;         // [E, out, in]
  TensorView y_RO;          // [R, out]
  TensorView offsets_E1;    // i64
  TensorView rows_E{};      // optional i32: rows of each expert that are not padding (see DispatchPlanArgs)
  bool accumulate = false;  // grouped_gemm_wgrad only
  // grouped_gemm_wgrad only, without accumulate and for w of bf16: partial sums of the squares of w as it is
  // stored, f32 [wgrad_squares_count()], all assigned. Their sum over all is in no given order of elements.
  TensorView squares_P{};
  BlockScaledCodes codes{};          // forward: of x and w; dgrad: of y and the transposed w; wgrad: none
  ColumnScaledCodes column_codes{};  // wgrad only
  MxCodes mx_codes{};                // of any of the three, in the place of both; without squares
};

// The two products beside the activation, each as one operation with it. gate_up, act, probs, dgate_up,
// dprobs and interleave are as in ops/scaled_swiglu.h.

// gate_up = x w^T, act = scaled_swiglu(gate_up): both assigned.
struct GroupedGateUpArgs {
  TensorView x_RD;
  TensorView w_E2FD;
  TensorView gate_up_R2F;
  TensorView probs_R;
  TensorView act_RF;
  TensorView offsets_E1;
  TensorView rows_E{};
  int64_t interleave = 0;
};

// dact = dy w, then dgate_up and dprobs = scaled_swiglu_backward(dact): dact itself is not kept where the
// backend fuses; `dact_RF` is workspace for a backend that does not.
struct GroupedDownBackwardArgs {
  TensorView dy_RD;
  TensorView w_EDF;
  TensorView gate_up_R2F;
  TensorView probs_R;
  TensorView dact_RF;
  TensorView dgate_up_R2F;  // may be gate_up itself
  TensorView dprobs_R;
  TensorView offsets_E1;
  TensorView rows_E{};
  int64_t interleave = 0;
};

// How many partial sums of squares grouped_gemm_wgrad gives for w of [experts, out, in]; 0: none on this
// device.
int64_t wgrad_squares_count(Device device, int64_t experts, int64_t out, int64_t in);

}  // namespace biomoe
