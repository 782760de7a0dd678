#include "biomoe/ops/fill.h"

#include "biomoe/ops/check_args.h"
#include "biomoe/ops/dispatch_device.h"

namespace biomoe {

void fill_zero(Context& ctx, const FillZeroArgs& args) {
  check_tensor("fill_zero", "x", args.x, args.x.dtype, args.x.shape);
  BIOMOE_RUN_ON_DEVICE(fill_zero, ctx, args);
}

void count_nonfinite(Context& ctx, const CountNonfiniteArgs& args) {
  constexpr const char* kOp = "count_nonfinite";
  check_compute_type(kOp, "x", args.x, ctx.device);
  check_tensor(kOp, "x", args.x, args.x.dtype, args.x.shape);
  check_tensor(kOp, "count", args.count_1, DType::kI64, Shape{1});
  BIOMOE_RUN_ON_DEVICE(count_nonfinite, ctx, args);
}

}  // namespace biomoe
