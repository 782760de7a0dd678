#include "biomoe/moe/moe_layer.h"

#include "biomoe/ops/dispatch.h"
#include "biomoe/ops/gemm.h"
#include "biomoe/ops/grouped_gemm.h"
#include "biomoe/ops/router.h"
#include "biomoe/ops/scaled_swiglu.h"

namespace biomoe {
namespace {

enum class Pass { kForward, kDgrad, kWgrad };

// The same product for expert `e` alone, as a dense GEMM on its rows.
void expert_gemm(Context& ctx, Pass pass, const GroupedGemmArgs& args, int64_t e) {
  const int64_t begin = args.offsets_E1.i64()[e], rows = args.offsets_E1.i64()[e + 1] - begin;
  if (rows == 0) return;
  const TensorView x = args.x_NI.rows(begin, rows), y = args.y_NO.rows(begin, rows),
                   expert = args.w_EOI.rows(e, 1);
  const TensorView w(expert.data, expert.dtype, Shape{expert.shape[1], expert.shape[2]});
  switch (pass) {
    case Pass::kForward:
      gemm(ctx, {.a = x, .b = w, .c = y, .transpose_b = true});
      break;
    case Pass::kDgrad:
      gemm(ctx, {.a = y, .b = w, .c = x});
      break;
    case Pass::kWgrad:
      gemm(ctx, {.a = y, .b = x, .c = w, .transpose_a = true, .accumulate = true});
      break;
  }
}

void experts_gemm(Context& ctx, ExpertFfnMode mode, Pass pass, const GroupedGemmArgs& args) {
  if (mode == ExpertFfnMode::kLoop) {
    for (int64_t e = 0; e < args.w_EOI.shape[0]; ++e) expert_gemm(ctx, pass, args, e);
    return;
  }
  switch (pass) {
    case Pass::kForward:
      grouped_gemm_forward(ctx, args);
      break;
    case Pass::kDgrad:
      grouped_gemm_dgrad(ctx, args);
      break;
    case Pass::kWgrad:
      grouped_gemm_wgrad(ctx, args);
      break;
  }
}

// [T, k] read as [T*k].
TensorView flat(const TensorView& view) {
  return TensorView(view.data, view.dtype, Shape{view.num_elements()});
}

}  // namespace

MoeSaved allocate_moe_saved(TensorAllocator& allocator, const MoeShape& shape, int64_t tokens) {
  const int64_t rows = tokens * shape.top_k;
  MoeSaved saved;
  saved.probs_TE = allocator.tensor(DType::kF32, {tokens, shape.experts});
  saved.experts_Tk = allocator.tensor(DType::kI32, {tokens, shape.top_k});
  saved.weights_Tk = allocator.tensor(DType::kF32, {tokens, shape.top_k});
  saved.router_lse_T = allocator.tensor(DType::kF32, {tokens});
  saved.offsets_E1 = allocator.tensor(DType::kI64, {shape.experts + 1});
  saved.row_of_slot_N = allocator.tensor(DType::kI32, {rows});
  saved.slot_of_row_N = allocator.tensor(DType::kI32, {rows});
  saved.row_weights_N = allocator.tensor(DType::kF32, {rows});
  saved.gate_up_N2F = allocator.tensor(DType::kF32, {rows, 2 * shape.expert_width});
  saved.act_NF = allocator.tensor(DType::kF32, {rows, shape.expert_width});
  return saved;
}

MoeWorkspace allocate_moe_workspace(TensorAllocator& allocator, const MoeShape& shape, int64_t tokens,
                                    bool training) {
  const int64_t rows = tokens * shape.top_k;
  MoeWorkspace workspace;
  workspace.logits_TE = allocator.tensor(DType::kF32, {tokens, shape.experts});
  workspace.x_ND = allocator.tensor(DType::kF32, {rows, shape.width});
  workspace.y_ND = allocator.tensor(DType::kF32, {rows, shape.width});
  if (training) {
    workspace.dact_NF = allocator.tensor(DType::kF32, {rows, shape.expert_width});
    workspace.dprobs_N = allocator.tensor(DType::kF32, {rows});
    workspace.dweights_Tk = allocator.tensor(DType::kF32, {tokens, shape.top_k});
  }
  return workspace;
}

void moe_route(Context& ctx, const MoeWeights& weights, TensorView x_TD, const MoeSaved& saved,
               const MoeWorkspace& workspace, const LayerRoutingStats& stats) {
  gemm(ctx, {.a = x_TD, .b = weights.gate_ED, .c = workspace.logits_TE, .transpose_b = true});
  router_forward(ctx, {.logits_TE = workspace.logits_TE,
                       .probs_TE = saved.probs_TE,
                       .experts_Tk = saved.experts_Tk,
                       .weights_Tk = saved.weights_Tk,
                       .lse_T = saved.router_lse_T,
                       .counts_E = stats.counts_E,
                       .prob_sums_E = stats.prob_sums_E,
                       .z_sum_1 = stats.z_sum_1});
}

void moe_forward(Context& ctx, ExpertFfnMode mode, const MoeShape& shape, const MoeWeights& weights,
                 TensorView x_TD, const MoeSaved& saved, const MoeWorkspace& workspace,
                 const LayerRoutingStats& stats, TensorView y_TD) {
  moe_route(ctx, weights, x_TD, saved, workspace, stats);
  dispatch_plan(ctx, {.experts_Tk = saved.experts_Tk,
                      .offsets_E1 = saved.offsets_E1,
                      .row_of_slot_N = saved.row_of_slot_N,
                      .slot_of_row_N = saved.slot_of_row_N});
  permute(ctx, {.x_TD = x_TD,
                .slot_of_row_N = saved.slot_of_row_N,
                .y_ND = workspace.x_ND,
                .values_N = flat(saved.weights_Tk),
                .y_values_N = saved.row_weights_N,
                .top_k = shape.top_k});
  experts_gemm(ctx, mode, Pass::kForward,
               {.x_NI = workspace.x_ND,
                .w_EOI = weights.gate_up_E2FD,
                .y_NO = saved.gate_up_N2F,
                .offsets_E1 = saved.offsets_E1});
  scaled_swiglu_forward(
      ctx, {.gate_up_N2F = saved.gate_up_N2F, .probs_N = saved.row_weights_N, .act_NF = saved.act_NF});
  experts_gemm(ctx, mode, Pass::kForward,
               {.x_NI = saved.act_NF,
                .w_EOI = weights.down_EDF,
                .y_NO = workspace.y_ND,
                .offsets_E1 = saved.offsets_E1});
  unpermute(ctx, {.y_ND = workspace.y_ND,
                  .row_of_slot_N = saved.row_of_slot_N,
                  .x_TD = y_TD,
                  .y_values_N = {},
                  .values_N = {},
                  .top_k = shape.top_k});
}

void moe_backward(Context& ctx, ExpertFfnMode mode, const MoeShape& shape, const MoeWeights& weights,
                  const MoeWeights& gradients, const MoeSaved& saved, const MoeWorkspace& workspace,
                  const MoeBackward& args) {
  // The combine is a plain sum, so its gradient is a permutation of dy.
  permute(ctx, {.x_TD = args.dy_TD,
                .slot_of_row_N = saved.slot_of_row_N,
                .y_ND = workspace.y_ND,
                .values_N = {},
                .y_values_N = {},
                .top_k = shape.top_k});
  const GroupedGemmArgs down{.x_NI = saved.act_NF,
                             .w_EOI = gradients.down_EDF,
                             .y_NO = workspace.y_ND,
                             .offsets_E1 = saved.offsets_E1};
  experts_gemm(ctx, mode, Pass::kWgrad, down);
  experts_gemm(ctx, mode, Pass::kDgrad,
               {.x_NI = workspace.dact_NF,
                .w_EOI = weights.down_EDF,
                .y_NO = workspace.y_ND,
                .offsets_E1 = saved.offsets_E1});
  scaled_swiglu_backward(ctx, {.dact_NF = workspace.dact_NF,
                               .gate_up_N2F = saved.gate_up_N2F,
                               .probs_N = saved.row_weights_N,
                               .dgate_up_N2F = saved.gate_up_N2F,
                               .dprobs_N = workspace.dprobs_N});
  // The permuted input is cheaper to gather again than to keep for every layer.
  permute(ctx, {.x_TD = args.x_TD,
                .slot_of_row_N = saved.slot_of_row_N,
                .y_ND = workspace.x_ND,
                .values_N = {},
                .y_values_N = {},
                .top_k = shape.top_k});
  experts_gemm(ctx, mode, Pass::kWgrad,
               {.x_NI = workspace.x_ND,
                .w_EOI = gradients.gate_up_E2FD,
                .y_NO = saved.gate_up_N2F,
                .offsets_E1 = saved.offsets_E1});
  experts_gemm(ctx, mode, Pass::kDgrad,
               {.x_NI = workspace.x_ND,
                .w_EOI = weights.gate_up_E2FD,
                .y_NO = saved.gate_up_N2F,
                .offsets_E1 = saved.offsets_E1});
  unpermute(ctx, {.y_ND = workspace.x_ND,
                  .row_of_slot_N = saved.row_of_slot_N,
                  .x_TD = args.dx_TD,
                  .y_values_N = workspace.dprobs_N,
                  .values_N = flat(workspace.dweights_Tk),
                  .top_k = shape.top_k});
  router_backward(ctx, {.probs_TE = saved.probs_TE,
                        .experts_Tk = saved.experts_Tk,
                        .weights_Tk = saved.weights_Tk,
                        .lse_T = saved.router_lse_T,
                        .dweights_Tk = workspace.dweights_Tk,
                        .balance_E = args.balance_E,
                        .z_scale = args.z_scale,
                        .dlogits_TE = workspace.logits_TE});
  gemm(ctx, {.a = workspace.logits_TE,
             .b = args.x_TD,
             .c = gradients.gate_ED,
             .transpose_a = true,
             .accumulate = true});
  gemm(ctx, {.a = workspace.logits_TE, .b = weights.gate_ED, .c = args.dx_TD, .accumulate = true});
}

}  // namespace biomoe
