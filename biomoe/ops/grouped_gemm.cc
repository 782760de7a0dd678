#include "biomoe/ops/grouped_gemm.h"

#include "biomoe/ops/check_args.h"
#include "biomoe/ops/dispatch_device.h"

namespace biomoe {
namespace {

void check(const char* op, const GroupedGemmArgs& args) {
  check_rank(op, "x", args.x_NI, 2);
  check_rank(op, "w", args.w_EOI, 3);
  const int64_t rows = args.x_NI.shape[0];
  const Shape& w = args.w_EOI.shape;
  check_tensor(op, "x", args.x_NI, DType::kF32, Shape{rows, w[2]}, Layout::kRows);
  check_tensor(op, "w", args.w_EOI, DType::kF32, w, Layout::kRows);
  check_tensor(op, "y", args.y_NO, DType::kF32, Shape{rows, w[1]}, Layout::kRows);
  check_tensor(op, "offsets", args.offsets_E1, DType::kI64, Shape{w[0] + 1});
}

}  // namespace

void grouped_gemm_forward(Context& ctx, const GroupedGemmArgs& args) {
  check("grouped_gemm_forward", args);
  BIOMOE_RUN_ON_DEVICE(grouped_gemm_forward, ctx, args);
}

void grouped_gemm_dgrad(Context& ctx, const GroupedGemmArgs& args) {
  check("grouped_gemm_dgrad", args);
  BIOMOE_RUN_ON_DEVICE(grouped_gemm_dgrad, ctx, args);
}

void grouped_gemm_wgrad(Context& ctx, const GroupedGemmArgs& args) {
  check("grouped_gemm_wgrad", args);
  BIOMOE_RUN_ON_DEVICE(grouped_gemm_wgrad, ctx, args);
}

}  // namespace biomoe
