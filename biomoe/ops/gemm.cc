#include "biomoe/ops/gemm.h"

#include "biomoe/ops/check_args.h"
#include "biomoe/ops/dispatch_device.h"

namespace biomoe {

void gemm(Context& ctx, const GemmArgs& args) {
  constexpr const char* kOp = "gemm";
  check_rank(kOp, "a", args.a, 2);
  check_rank(kOp, "b", args.b, 2);
  check_rank(kOp, "c", args.c, 2);
  const int64_t rows = args.a.shape[args.transpose_a ? 1 : 0];
  const int64_t inner = args.a.shape[args.transpose_a ? 0 : 1];
  const int64_t columns = args.b.shape[args.transpose_b ? 0 : 1];
  check_compute_type(kOp, "a", args.a, ctx.device);
  check_compute_type(kOp, "c", args.c, ctx.device);
  check_tensor(kOp, "a", args.a, args.a.dtype, args.a.shape, Layout::kRows);
  check_tensor(kOp, "b", args.b, args.a.dtype,
               args.transpose_b ? Shape{columns, inner} : Shape{inner, columns}, Layout::kRows);
  check_tensor(kOp, "c", args.c, args.c.dtype, Shape{rows, columns}, Layout::kRows);
  BIOMOE_RUN_ON_DEVICE(gemm, ctx, args);
}

}  // namespace biomoe
