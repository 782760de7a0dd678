// SwiGLU with the routing probability applied inside the activation, so that the output of the down
// projection need not be saved for the probability's gradient.
#pragma once

#include "biomoe/core/tensor_view.h"
#include "biomoe/ops/op_list.h"

namespace biomoe {

// act[r, f] = silu(gate) * up * probs[r], silu(x) = x / (1 + exp(-x)). With interleave = 0, gate = gate_up[r,
// f] and up = gate_up[r, F + f]; with interleave = b, which divides F, blocks of b gate columns and b up
// columns take turns: gate = gate_up[r, 2 b (f / b) + f % b] and up is b columns further. Rows from
// offsets[E] on, where given, are neither read nor written.
struct ScaledSwigluForwardArgs {
  TensorView gate_up_R2F;
  TensorView probs_R;       // f32
  TensorView act_RF;        // assigned
  TensorView offsets_E1{};  // optional i64
  int64_t interleave = 0;
};

struct ScaledSwigluBackwardArgs {
  TensorView dact_RF;
  TensorView gate_up_R2F;
  TensorView probs_R;
  TensorView dgate_up_R2F;  // assigned; may be gate_up itself
  TensorView dprobs_R;      // f32, assigned
  TensorView offsets_E1{};  // optional i64
  int64_t interleave = 0;
};

}  // namespace biomoe
