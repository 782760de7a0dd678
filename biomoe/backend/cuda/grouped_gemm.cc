// Routes the products of experts to the kernels that this GPU has.
#include "biomoe/ops/grouped_gemm.h"

#include <cuda_runtime.h>

#include "biomoe/backend/cuda/gemm/grouped_gemm_sm90.h"
#include "biomoe/backend/cuda/gemm_of_codes.h"
#include "biomoe/backend/cuda/mx_products.h"
#include "biomoe/backend/cuda/state.h"
#include "biomoe/core/error.h"
#include "biomoe/ops/cuda_sizes.h"

namespace biomoe::cuda {
namespace {

static_assert(kExpertRowAlignment == sm90::kSegmentRows && kSquaresColumns == sm90::kTileColumns);
static_assert(kScaleBlock == sm90::kScaleBlock);

// What sm90's kernels ask of every product: the GPU, bf16, rows padded for tiles, and no gaps between rows.
void check_device(const char* op, const Context& ctx, const TensorView& x) {
  if (ctx.state->compute_capability != 90) {
    throw user_error(
        "{}: the kernels for all experts at once are for compute capability 9.0, and this GPU has "
        "{}.{}; set expert_ffn_mode=loop",
        op, ctx.state->compute_capability / 10, ctx.state->compute_capability % 10);
  }
  if (x.dtype != DType::kBF16) {
    throw user_error(
        "{}: the kernels for all experts at once compute in BF16, not {}; set expert_ffn_mode=loop", op,
        dtype_name(x.dtype));
  }
}

void check_supported(const char* op, const Context& ctx, const TensorView& x, const TensorView& rows) {
  check_device(op, ctx, x);
  BM_CHECK(rows, "{}: needs rows (experts' rows padded to {})", op, sm90::kSegmentRows);
}

void check_interleave(const char* op, int64_t interleave) {
  BM_CHECK(interleave == kGateUpInterleave, "{}: gate and up interleaved by {}, expected {}", op, interleave,
           kGateUpInterleave);
}

__nv_bfloat16* bf16(const char* op, const TensorView& view) {
  BM_CHECK(view.contiguous() && view.dtype == DType::kBF16, "{}: {} {} with a row stride of {}", op,
           dtype_name(view.dtype), view.shape.str(), view.row_stride);
  return static_cast<__nv_bfloat16*>(view.data);
}

sm90::ExpertRows expert_rows(const TensorView& offsets, const TensorView& rows, int64_t capacity) {
  return {.offsets = offsets.i64(),
          .rows_valid = rows.i32(),
          .experts = static_cast<int>(rows.shape[0]),
          .capacity = capacity};
}

// `transposed`: the scales are those of weights that lie the other way.
sm90::Fp8Operands fp8_operands(const BlockScaledCodes& codes, bool transposed) {
  if (!codes) return {};
  const int64_t columns = codes.weight_scales_NB.shape[1];
  return {.rows = static_cast<const uint8_t*>(codes.rows_RK.data),
          .row_scales = codes.row_scales_BR.f32(),
          .row_scales_stride = codes.row_scales_BR.shape[1],
          .weights = static_cast<const uint8_t*>(codes.weights_ENK.data),
          .weight_scales = codes.weight_scales_NB.f32(),
          .expert_stride = codes.weight_scales_NB.num_elements() / codes.weights_ENK.shape[0],
          .n_stride = transposed ? 1 : columns,
          .k_stride = transposed ? columns : 1};
}

sm90::Fp8Columns fp8_columns(const ColumnScaledCodes& codes) {
  if (!codes) return {};
  return {.dy = static_cast<const uint8_t*>(codes.y_OR.data),
          .dy_scales = codes.y_scales_BO.f32(),
          .x = static_cast<const uint8_t*>(codes.x_IR.data),
          .x_scales = codes.x_scales_BI.f32()};
}

template <typename Problem>
void run(const char* op, const Context& ctx, const Problem& problem) {
  sm90::GroupedGemmPlan plan;
  sm90::Tiling tiling = sm90::choose_tiling(problem);
  tiling.multiprocessors = ctx.multiprocessors;
  const cudaError_t error = sm90::make_plan(problem, tiling, &plan);
  if (error == cudaErrorInvalidValue) {
    throw user_error(
        "{}: {} experts of these widths cannot run as one product (at most {} experts, widths that "
        "are multiples of 8, expert widths of 32); set expert_ffn_mode=loop",
        op, problem.rows.experts, sm90::kMaxExperts);
  }
  check(error, op);
  check(plan.launch(ctx.state->stream), op);
}

}  // namespace

void grouped_gemm_forward(Context& ctx, const GroupedGemmArgs& args) {
  constexpr const char* kOp = "grouped_gemm_forward";
  if (args.mx_codes) return mx_forward(ctx, args);
  check_supported(kOp, ctx, args.x_RI, args.rows_E);
  const int64_t capacity = args.x_RI.shape[0];
  if (args.y_RO.num_elements() == 0) return;
  run(kOp, ctx,
      sm90::ForwardProblem{.rows = expert_rows(args.offsets_E1, args.rows_E, capacity),
                           .in = args.w_EOI.shape[2],
                           .out = args.w_EOI.shape[1],
                           .x = bf16(kOp, args.x_RI),
                           .w = bf16(kOp, args.w_EOI),
                           .y = bf16(kOp, args.y_RO),
                           .workspace = ctx.state->split_workspace,
                           .fp8 = fp8_operands(args.codes, false)});
}

void grouped_gemm_dgrad(Context& ctx, const GroupedGemmArgs& args) {
  constexpr const char* kOp = "grouped_gemm_dgrad";
  if (args.mx_codes) return mx_dgrad(ctx, args);
  check_supported(kOp, ctx, args.x_RI, args.rows_E);
  const int64_t capacity = args.x_RI.shape[0];
  if (args.x_RI.num_elements() == 0) return;
  run(kOp, ctx,
      sm90::DgradProblem{.rows = expert_rows(args.offsets_E1, args.rows_E, capacity),
                         .in = args.w_EOI.shape[2],
                         .out = args.w_EOI.shape[1],
                         .dy = bf16(kOp, args.y_RO),
                         .w = bf16(kOp, args.w_EOI),
                         .dx = bf16(kOp, args.x_RI),
                         .workspace = ctx.state->split_workspace,
                         .fp8 = fp8_operands(args.codes, true)});
}

void grouped_gemm_wgrad(Context& ctx, const GroupedGemmArgs& args) {
  constexpr const char* kOp = "grouped_gemm_wgrad";
  if (args.mx_codes) return mx_wgrad(ctx, args);
  check_supported(kOp, ctx, args.x_RI, args.rows_E);
  const int64_t capacity = args.x_RI.shape[0];
  if (args.w_EOI.num_elements() == 0) return;
  BM_CHECK(args.w_EOI.contiguous(), "{}: dw {} has a row stride of {}", kOp, args.w_EOI.shape.str(),
           args.w_EOI.row_stride);
  if (capacity == 0) {  // no tile to start from
    if (!args.accumulate) {
      check(cudaMemsetAsync(args.w_EOI.data, 0, args.w_EOI.bytes(), ctx.state->stream), kOp);
      if (args.squares_P) {
        check(cudaMemsetAsync(args.squares_P.data, 0, args.squares_P.bytes(), ctx.state->stream), kOp);
      }
    }
    return;
  }
  const bool fp32 = args.w_EOI.dtype == DType::kF32;
  const sm90::WgradProblem problem{.rows = expert_rows(args.offsets_E1, args.rows_E, capacity),
                                   .in = args.w_EOI.shape[2],
                                   .out = args.w_EOI.shape[1],
                                   .dy = bf16(kOp, args.y_RO),
                                   .x = bf16(kOp, args.x_RI),
                                   .dw = args.w_EOI.data,
                                   .type = fp32 ? sm90::GradientType::kFp32 : sm90::GradientType::kBf16,
                                   .accumulate = args.accumulate,
                                   .square_sums = args.squares_P.f32(),
                                   .fp8 = fp8_columns(args.column_codes)};
  BM_CHECK(!args.squares_P || args.squares_P.num_elements() == sm90::wgrad_square_sums_count(problem),
           "{}: {} sums of squares, the kernel makes {}", kOp, args.squares_P.num_elements(),
           sm90::wgrad_square_sums_count(problem));
  run(kOp, ctx, problem);
}

void grouped_gate_up(Context& ctx, const GroupedGateUpArgs& args) {
  constexpr const char* kOp = "grouped_gate_up";
  check_supported(kOp, ctx, args.x_RD, args.rows_E);
  check_interleave(kOp, args.interleave);
  if (args.gate_up_R2F.num_elements() == 0) return;
  run(kOp, ctx,
      sm90::GateUpProblem{.rows = expert_rows(args.offsets_E1, args.rows_E, args.x_RD.shape[0]),
                          .in = args.x_RD.shape[1],
                          .features = args.act_RF.shape[1],
                          .x = bf16(kOp, args.x_RD),
                          .w = bf16(kOp, args.w_E2FD),
                          .prob = args.probs_R.f32(),
                          .gate_up = bf16(kOp, args.gate_up_R2F),
                          .act = bf16(kOp, args.act_RF)});
}

void grouped_down_backward(Context& ctx, const GroupedDownBackwardArgs& args) {
  constexpr const char* kOp = "grouped_down_backward";
  check_supported(kOp, ctx, args.dy_RD, args.rows_E);
  check_interleave(kOp, args.interleave);
  if (args.dact_RF.num_elements() == 0) return;
  sm90::DownDgradProblem problem{.rows = expert_rows(args.offsets_E1, args.rows_E, args.dy_RD.shape[0]),
                                 .features = args.dact_RF.shape[1],
                                 .out = args.dy_RD.shape[1],
                                 .dy = bf16(kOp, args.dy_RD),
                                 .w = bf16(kOp, args.w_EDF),
                                 .gate_up = bf16(kOp, args.gate_up_R2F),
                                 .prob = args.probs_R.f32(),
                                 .dgate_up = bf16(kOp, args.dgate_up_R2F),
                                 .dprob = args.dprobs_R.f32()};
  // dact is not stored; its memory takes the partial sums of dprobs.
  problem.dprob_partials = static_cast<float*>(args.dact_RF.data);
  const auto partials = static_cast<size_t>(sm90::dprob_partials_count(problem)) * sizeof(float);
  BM_CHECK(partials <= args.dact_RF.bytes() && args.dact_RF.contiguous(),
           "{}: {} bytes of partial sums in {}", kOp, partials, args.dact_RF.bytes());
  run(kOp, ctx, problem);
}

void gemm_of_codes(Context& ctx, const GemmArgs& args) {
  constexpr const char* kOp = "gemm";
  check_device(kOp, ctx, args.a);
  const int64_t rows = args.a.shape[0];
  if (rows == 0 && args.column_codes && !args.accumulate) {
    check(cudaMemsetAsync(args.c.data, 0, args.c.bytes(), ctx.state->stream), kOp);
  }
  if (rows == 0) return;
  const sm90::ExpertRows one{.experts = 1, .capacity = rows};
  if (args.column_codes) {
    const bool fp32 = args.c.dtype == DType::kF32;
    run(kOp, ctx,
        sm90::WgradProblem{.rows = one,
                           .in = args.b.shape[1],
                           .out = args.a.shape[1],
                           .dw = args.c.data,
                           .type = fp32 ? sm90::GradientType::kFp32 : sm90::GradientType::kBf16,
                           .accumulate = args.accumulate,
                           .fp8 = fp8_columns(args.column_codes)});
  } else if (args.transpose_b) {
    run(kOp, ctx,
        sm90::ForwardProblem{.rows = one,
                             .in = args.b.shape[1],
                             .out = args.b.shape[0],
                             .y = bf16(kOp, args.c),
                             .workspace = ctx.state->split_workspace,
                             .fp8 = fp8_operands(args.codes, false)});
  } else {
    run(kOp, ctx,
        sm90::DgradProblem{.rows = one,
                           .in = args.b.shape[1],
                           .out = args.b.shape[0],
                           .dx = bf16(kOp, args.c),
                           .workspace = ctx.state->split_workspace,
                           .fp8 = fp8_operands(args.codes, true)});
  }
}

}  // namespace biomoe::cuda
