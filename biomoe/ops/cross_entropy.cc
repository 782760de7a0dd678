#include "biomoe/ops/cross_entropy.h"

#include "biomoe/ops/check_args.h"
#include "biomoe/ops/dispatch_device.h"

namespace biomoe {

void cross_entropy(Context& ctx, const CrossEntropyArgs& args) {
  constexpr const char* kOp = "cross_entropy";
  check_rank(kOp, "logits", args.logits_TV, 2);
  const Shape rows{args.logits_TV.shape[0]};
  check_compute_type(kOp, "logits", args.logits_TV, ctx.device);
  check_tensor(kOp, "logits", args.logits_TV, args.logits_TV.dtype, args.logits_TV.shape, Layout::kRows);
  check_tensor(kOp, "targets", args.targets_T, DType::kI32, rows);
  check_tensor(kOp, "weights", args.weights_T, DType::kF32, rows);
  check_tensor(kOp, "nll", args.nll_T, DType::kF32, rows);
  if (args.write_gradient) check_tensor(kOp, "grad_scale", args.grad_scale_1, DType::kF64, Shape{1});
  BIOMOE_RUN_ON_DEVICE(cross_entropy, ctx, args);
}

void loss_sums(Context& ctx, const LossSumsArgs& args) {
  constexpr const char* kOp = "loss_sums";
  check_rank(kOp, "nll", args.nll_T, 1);
  check_tensor(kOp, "nll", args.nll_T, DType::kF32, args.nll_T.shape);
  check_tensor(kOp, "weights", args.weights_T, DType::kF32, args.nll_T.shape);
  check_tensor(kOp, "sums", args.sums_3, DType::kF64, Shape{3});
  BIOMOE_RUN_ON_DEVICE(loss_sums, ctx, args);
}

}  // namespace biomoe
