// Top-k router of Mixtral: softmax over all experts in fp32, the k largest, renormalised to sum 1; and the
// statistics of its two auxiliary losses.
#pragma once

#include "biomoe/core/tensor_view.h"
#include "biomoe/ops/op_list.h"

namespace biomoe {

// Ties (exactly equal probabilities) go to the lowest expert index. A NaN never wins over a number; a row of
// NaN selects experts 0..k-1 with NaN weights, so that indices stay valid and the loss shows the fault.
struct RouterForwardArgs {
  TensorView logits_TE;    // f32
  TensorView probs_TE;     // f32, assigned: softmax over all experts
  TensorView experts_Tk;   // i32, assigned, in falling order of probability
  TensorView weights_Tk;   // f32, assigned: probabilities of the k, divided by their sum
  TensorView lse_T;        // f32, assigned: logsumexp of the logits
  TensorView counts_E;     // i64, ACCUMULATED: (token, slot) pairs routed to each expert
  TensorView prob_sums_E;  // f64, ACCUMULATED: sum over tokens of probs (order independent of thread count)
  TensorView z_sum_1;      // f64 [1], ACCUMULATED: sum over tokens of lse^2
};

// dlogits = gradient of the weights, of  sum_te balance_E[e] * probs[t,e]  and of  z_scale * sum_t lse[t]^2.
struct RouterBackwardArgs {
  TensorView probs_TE;
  TensorView experts_Tk;
  TensorView weights_Tk;
  TensorView lse_T;
  TensorView dweights_Tk;
  TensorView balance_E;  // f32, optional
  double z_scale = 0.0;
  TensorView dlogits_TE;  // assigned
};

}  // namespace biomoe
