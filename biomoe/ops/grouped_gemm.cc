#include "biomoe/ops/grouped_gemm.h"

#include "biomoe/ops/check_args.h"
#include "biomoe/ops/check_codes.h"
#include "biomoe/ops/cuda_sizes.h"
#include "biomoe/ops/dispatch_device.h"

namespace biomoe {
namespace {

// Codes may stand in the place of x or y, or of both.
void check(const char* op, Device device, const GroupedGemmArgs& args, bool x_in_codes, bool y_in_codes) {
  check_rank(op, "x", args.x_RI, 2);
  check_rank(op, "w", args.w_EOI, 3);
  check_compute_type(op, "x", args.x_RI, device);
  check_compute_type(op, "w", args.w_EOI, device);
  const int64_t rows = args.x_RI.shape[0];
  const Shape& w = args.w_EOI.shape;
  const auto layout = [](bool in_codes) { return in_codes ? Layout::kShapeOnly : Layout::kRows; };
  check_tensor(op, "x", args.x_RI, args.x_RI.dtype, Shape{rows, w[2]}, layout(x_in_codes));
  check_tensor(op, "w", args.w_EOI, args.w_EOI.dtype, w, Layout::kRows);
  check_tensor(op, "y", args.y_RO, args.x_RI.dtype, Shape{rows, w[1]}, layout(y_in_codes));
  check_tensor(op, "offsets", args.offsets_E1, DType::kI64, Shape{w[0] + 1});
  if (args.rows_E) check_tensor(op, "rows", args.rows_E, DType::kI32, Shape{w[0]});
}

}  // namespace

void grouped_gemm_forward(Context& ctx, const GroupedGemmArgs& args) {
  constexpr const char* kOp = "grouped_gemm_forward";
  check(kOp, ctx.device, args, static_cast<bool>(args.codes), false);
  check_codes(kOp, ctx.device, args.codes, args.x_RI.shape[0], args.w_EOI.shape, false);
  check_mx_codes(kOp, args.mx_codes, MxProduct::kForward, args.x_RI.shape[0], args.w_EOI.shape);
  BIOMOE_RUN_ON_DEVICE(grouped_gemm_forward, ctx, args);
}

void grouped_gemm_dgrad(Context& ctx, const GroupedGemmArgs& args) {
  constexpr const char* kOp = "grouped_gemm_dgrad";
  check(kOp, ctx.device, args, false, static_cast<bool>(args.codes));
  check_codes(kOp, ctx.device, args.codes, args.x_RI.shape[0], args.w_EOI.shape, true);
  check_mx_codes(kOp, args.mx_codes, MxProduct::kDgrad, args.x_RI.shape[0], args.w_EOI.shape);
  BIOMOE_RUN_ON_DEVICE(grouped_gemm_dgrad, ctx, args);
}

void grouped_gemm_wgrad(Context& ctx, const GroupedGemmArgs& args) {
  constexpr const char* kOp = "grouped_gemm_wgrad";
  const auto in_codes = static_cast<bool>(args.column_codes);
  check(kOp, ctx.device, args, in_codes, in_codes);
  BM_CHECK(!args.codes, "{}: sums over rows, whose codes are column_codes", kOp);
  check_column_codes(kOp, ctx.device, args.column_codes, args.x_RI.shape[0], args.w_EOI.shape);
  check_mx_codes(kOp, args.mx_codes, MxProduct::kWgrad, args.x_RI.shape[0], args.w_EOI.shape);
  BM_CHECK(!args.mx_codes || !args.squares_P, "{}: no sums of squares with MX codes", kOp);
  if (args.squares_P) {
    const Shape& w = args.w_EOI.shape;
    check_tensor(kOp, "squares", args.squares_P, DType::kF32,
                 Shape{wgrad_squares_count(ctx.device, w[0], w[1], w[2])});
    BM_CHECK(args.w_EOI.dtype == DType::kBF16 && !args.accumulate,
             "{}: sums of squares are of a bf16 gradient that is assigned", kOp);
  }
  BIOMOE_RUN_ON_DEVICE(grouped_gemm_wgrad, ctx, args);
}

int64_t wgrad_squares_count(Device device, int64_t experts, int64_t out, int64_t in) {
  if (device == Device::kCpu) return 0;
  const auto tiles = [](int64_t size, int64_t tile) { return (size + tile - 1) / tile; };
  return experts * tiles(out, cuda::kExpertRowAlignment) * (cuda::kExpertRowAlignment / cuda::kSquaresRows) *
         tiles(in, cuda::kSquaresColumns);
}

void grouped_gate_up(Context& ctx, const GroupedGateUpArgs& args) {
  constexpr const char* kOp = "grouped_gate_up";
  check(kOp, ctx.device,
        {.x_RI = args.x_RD,
         .w_EOI = args.w_E2FD,
         .y_RO = args.gate_up_R2F,
         .offsets_E1 = args.offsets_E1,
         .rows_E = args.rows_E},
        false, false);
  const Shape& gate_up = args.gate_up_R2F.shape;
  check_tensor(kOp, "act", args.act_RF, args.x_RD.dtype, Shape{gate_up[0], gate_up[1] / 2}, Layout::kRows);
  check_tensor(kOp, "probs", args.probs_R, DType::kF32, Shape{gate_up[0]});
  BIOMOE_RUN_ON_DEVICE(grouped_gate_up, ctx, args);
}

void grouped_down_backward(Context& ctx, const GroupedDownBackwardArgs& args) {
  constexpr const char* kOp = "grouped_down_backward";
  check(kOp, ctx.device,
        {.x_RI = args.dact_RF,
         .w_EOI = args.w_EDF,
         .y_RO = args.dy_RD,
         .offsets_E1 = args.offsets_E1,
         .rows_E = args.rows_E},
        false, false);
  const Shape& act = args.dact_RF.shape;
  const Shape gate_up{act[0], 2 * act[1]};
  check_tensor(kOp, "gate_up", args.gate_up_R2F, args.dy_RD.dtype, gate_up, Layout::kRows);
  check_tensor(kOp, "dgate_up", args.dgate_up_R2F, args.dy_RD.dtype, gate_up, Layout::kRows);
  check_tensor(kOp, "probs", args.probs_R, DType::kF32, Shape{act[0]});
  check_tensor(kOp, "dprobs", args.dprobs_R, DType::kF32, Shape{act[0]});
  BIOMOE_RUN_ON_DEVICE(grouped_down_backward, ctx, args);
}

}  // namespace biomoe
