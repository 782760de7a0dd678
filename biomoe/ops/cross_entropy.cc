#include "biomoe/ops/cross_entropy.h"

#include "biomoe/ops/check_args.h"
#include "biomoe/ops/dispatch_device.h"

namespace biomoe {

void cross_entropy(Context& ctx, const CrossEntropyArgs& args) {
  constexpr const char* kOp = "cross_entropy";
  check_rank(kOp, "logits", args.logits_TV, 2);
  const Shape rows{args.logits_TV.shape[0]};
  check_tensor(kOp, "logits", args.logits_TV, DType::kF32, args.logits_TV.shape, Layout::kRows);
  check_tensor(kOp, "targets", args.targets_T, DType::kI32, rows);
  check_tensor(kOp, "weights", args.weights_T, DType::kF32, rows);
  check_tensor(kOp, "nll", args.nll_T, DType::kF32, rows);
  BIOMOE_RUN_ON_DEVICE(cross_entropy, ctx, args);
}

}  // namespace biomoe
