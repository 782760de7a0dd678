// Top-k router of Mixtral: softmax over all experts in fp32, the k largest, renormalised to sum 1; and its
// two auxiliary losses.
#pragma once

#include "biomoe/core/context.h"
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

// Bytes of ctx.scratch that router_forward takes.
size_t router_forward_scratch_bytes(Device device, int64_t tokens, int64_t experts);

// dlogits = gradient of the weights, of  sum_te balance_E[e] * probs[t,e]  and of  z_scale * sum_t lse[t]^2.
struct RouterBackwardArgs {
  TensorView probs_TE;
  TensorView experts_Tk;
  TensorView weights_Tk;
  TensorView lse_T;
  TensorView dweights_Tk;
  TensorView balance_E;  // f32, optional
  double z_scale = 0.0;
  TensorView dlogits_TE;  // assigned: f32, or bf16 for products with bf16 activations
};

// What experts' loads are to be even over: tokens of all layers together, as `transformers` has it (a layer
// that sends everything to two experts then costs nothing where others send it to the other ones), or of
// each.
enum class BalanceOver : uint8_t { kAllLayers, kEachLayer };

// The auxiliary losses of the routers of all layers, from the statistics of `tokens` tokens (a layer each):
//   losses[0] = E * sum_e f_e P_e, f_e the (token, slot) pairs at expert e and P_e the summed probability of
//   e over all layers, both divided by L * tokens: Switch-style load balancing (Fedus et al., 2021) as
//   `transformers` computes it for Mixtral; with kEachLayer the mean over layers of the same of each, both
//   divided by tokens, as Switch has it; losses[1] = mean of lse^2: the router z-loss of ST-MoE (Zoph et
//   al., 2022); balance[l, e] = balance_coef * d losses[0] / d(probability of e, any token of layer l), f_e
//   held constant.
// All 0 when tokens is 0.
struct BalanceLossArgs {
  TensorView counts_LE;     // i64
  TensorView prob_sums_LE;  // f64
  TensorView z_sums_L;      // f64
  int64_t tokens = 0;
  BalanceOver over = BalanceOver::kAllLayers;
  double balance_coef = 0;
  TensorView losses_2;    // f64, assigned
  TensorView balance_LE;  // f32, assigned
};

}  // namespace biomoe
