#include "biomoe/ops/scaled_swiglu.h"

#include "biomoe/ops/check_args.h"
#include "biomoe/ops/dispatch_device.h"

namespace biomoe {
namespace {

struct Arguments {
  const TensorView& act_RF;
  const TensorView& gate_up_R2F;
  const TensorView& probs_R;
  const TensorView& offsets_E1;
  int64_t interleave;
};

void check_arguments(const char* op, Device device, const Arguments& args) {
  check_rank(op, "act", args.act_RF, 2);
  check_compute_type(op, "act", args.act_RF, device);
  const int64_t rows = args.act_RF.shape[0];
  const int64_t width = args.act_RF.shape[1];
  const DType type = args.act_RF.dtype;
  check_tensor(op, "act", args.act_RF, type, args.act_RF.shape, Layout::kRows);
  check_tensor(op, "gate_up", args.gate_up_R2F, type, Shape{rows, 2 * width}, Layout::kRows);
  check_tensor(op, "probs", args.probs_R, DType::kF32, Shape{rows});
  if (args.offsets_E1) check_tensor(op, "offsets", args.offsets_E1, DType::kI64, args.offsets_E1.shape);
  BM_CHECK(args.interleave >= 0 && (args.interleave == 0 || width % args.interleave == 0),
           "{}: interleave is {}, expected 0 or a divisor of the width {}", op, args.interleave, width);
}

}  // namespace

void scaled_swiglu_forward(Context& ctx, const ScaledSwigluForwardArgs& args) {
  check_arguments("scaled_swiglu_forward", ctx.device,
                  {args.act_RF, args.gate_up_R2F, args.probs_R, args.offsets_E1, args.interleave});
  BIOMOE_RUN_ON_DEVICE(scaled_swiglu_forward, ctx, args);
}

void scaled_swiglu_backward(Context& ctx, const ScaledSwigluBackwardArgs& args) {
  constexpr const char* kOp = "scaled_swiglu_backward";
  check_arguments(kOp, ctx.device,
                  {args.dact_RF, args.gate_up_R2F, args.probs_R, args.offsets_E1, args.interleave});
  check_tensor(kOp, "dgate_up", args.dgate_up_R2F, args.dact_RF.dtype, args.gate_up_R2F.shape, Layout::kRows);
  check_tensor(kOp, "dprobs", args.dprobs_R, DType::kF32, args.probs_R.shape);
  BIOMOE_RUN_ON_DEVICE(scaled_swiglu_backward, ctx, args);
}

}  // namespace biomoe
