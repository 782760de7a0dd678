// SwiGLU with the routing probability applied inside the activation, so that the output of the down
// projection need not be saved for the probability's gradient.
#pragma once

#include "biomoe/core/tensor_view.h"
#include "biomoe/ops/op_list.h"

namespace biomoe {

// act[r, f] = silu(gate) * up * probs[r], gate = gate_up[r, f], up = gate_up[r, F + f], silu(x) = x / (1 +
// exp(-x)).
struct ScaledSwigluForwardArgs {
  TensorView gate_up_N2F;
  TensorView probs_N;  // f32
  TensorView act_NF;   // assigned
};

struct ScaledSwigluBackwardArgs {
  TensorView dact_NF;
  TensorView gate_up_N2F;
  TensorView probs_N;
  TensorView dgate_up_N2F;  // assigned; may be gate_up itself
  TensorView dprobs_N;      // f32, assigned
};

}  // namespace biomoe
