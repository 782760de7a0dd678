#include "biomoe/ops/scaled_swiglu.h"

#include "biomoe/ops/check_args.h"
#include "biomoe/ops/dispatch_device.h"

namespace biomoe {
namespace {

void check_arguments(const char* op, const TensorView& act_NF, const TensorView& gate_up_N2F,
                     const TensorView& probs_N) {
  check_rank(op, "act", act_NF, 2);
  const int64_t rows = act_NF.shape[0];
  const int64_t width = act_NF.shape[1];
  check_tensor(op, "act", act_NF, DType::kF32, act_NF.shape, Layout::kRows);
  check_tensor(op, "gate_up", gate_up_N2F, DType::kF32, Shape{rows, 2 * width}, Layout::kRows);
  check_tensor(op, "probs", probs_N, DType::kF32, Shape{rows});
}

}  // namespace

void scaled_swiglu_forward(Context& ctx, const ScaledSwigluForwardArgs& args) {
  check_arguments("scaled_swiglu_forward", args.act_NF, args.gate_up_N2F, args.probs_N);
  BIOMOE_RUN_ON_DEVICE(scaled_swiglu_forward, ctx, args);
}

void scaled_swiglu_backward(Context& ctx, const ScaledSwigluBackwardArgs& args) {
  constexpr const char* kOp = "scaled_swiglu_backward";
  check_arguments(kOp, args.dact_NF, args.gate_up_N2F, args.probs_N);
  check_tensor(kOp, "dgate_up", args.dgate_up_N2F, DType::kF32, args.gate_up_N2F.shape, Layout::kRows);
  check_tensor(kOp, "dprobs", args.dprobs_N, DType::kF32, args.probs_N.shape);
  BIOMOE_RUN_ON_DEVICE(scaled_swiglu_backward, ctx, args);
}

}  // namespace biomoe
