#include "biomoe/moe/moe_layer.h"

#include "biomoe/ops/device.h"
#include "biomoe/ops/dispatch.h"
#include "biomoe/ops/fill.h"
#include "biomoe/ops/gemm.h"
#include "biomoe/ops/grouped_gemm.h"
#include "biomoe/ops/router.h"
#include "biomoe/ops/scaled_swiglu.h"

namespace biomoe {
namespace {

enum class Pass { kForward, kDgrad, kWgrad };

// The same product for rows [begin, end) of expert `e` alone, as a dense GEMM.
void expert_gemm(Context& ctx, Pass pass, const GroupedGemmArgs& args, int64_t e, int64_t begin,
                 int64_t end) {
  const int64_t rows = end - begin;
  const TensorView expert = args.w_EOI.rows(e, 1);
  const TensorView w(expert.data, expert.dtype, Shape{expert.shape[1], expert.shape[2]});
  if (rows == 0) {
    if (pass == Pass::kWgrad && !args.accumulate) fill_zero(ctx, {.x = w});
    return;
  }
  const TensorView x = args.x_RI.rows(begin, rows), y = args.y_RO.rows(begin, rows);
  switch (pass) {
    case Pass::kForward:
      gemm(ctx, {.a = x, .b = w, .c = y, .transpose_b = true});
      break;
    case Pass::kDgrad:
      gemm(ctx, {.a = y, .b = w, .c = x});
      break;
    case Pass::kWgrad:
      gemm(ctx, {.a = y, .b = x, .c = w, .transpose_a = true, .accumulate = args.accumulate});
      break;
  }
}

// Runs the products of one layer in the mode asked for.
class Experts {
 public:
  // In a loop the host must know the routing: it waits for the offsets (sync).
  Experts(Context& ctx, ExpertFfnMode mode, const MoeSaved& saved, const MoeWorkspace& workspace)
      : ctx_(ctx), mode_(mode), saved_(saved), host_offsets_(saved.offsets_E1) {
    if (mode_ != ExpertFfnMode::kLoop || ctx.device == Device::kCpu) return;
    host_offsets_ = workspace.offsets_host_E1;
    copy_to_host(ctx, host_offsets_.data, saved.offsets_E1.data, saved.offsets_E1.bytes());
    device_wait_sync(ctx);
  }

  void run(Pass pass, TensorView x_RI, TensorView w_EOI, TensorView y_RO, bool accumulate = false) {
    const GroupedGemmArgs args{.x_RI = x_RI,
                               .w_EOI = w_EOI,
                               .y_RO = y_RO,
                               .offsets_E1 = saved_.offsets_E1,
                               .rows_E = saved_.rows_E,
                               .accumulate = accumulate};
    if (mode_ == ExpertFfnMode::kLoop) {
      const int64_t* offsets = host_offsets_.i64();
      for (int64_t e = 0; e < w_EOI.shape[0]; ++e)
        expert_gemm(ctx_, pass, args, e, offsets[e], offsets[e + 1]);
    } else if (pass == Pass::kForward) {
      grouped_gemm_forward(ctx_, args);
    } else if (pass == Pass::kDgrad) {
      grouped_gemm_dgrad(ctx_, args);
    } else {
      grouped_gemm_wgrad(ctx_, args);
    }
  }

 private:
  Context& ctx_;
  ExpertFfnMode mode_;
  const MoeSaved& saved_;
  TensorView host_offsets_;
};

// [T, k] read as [T*k].
TensorView flat(const TensorView& view) {
  return TensorView(view.data, view.dtype, Shape{view.num_elements()});
}

}  // namespace

MoeSaved allocate_moe_saved(TensorAllocator& allocator, const MoeShape& shape, int64_t tokens) {
  const int64_t slots = tokens * shape.top_k, rows = shape.rows(tokens);
  MoeSaved saved;
  saved.probs_TE = allocator.tensor(DType::kF32, {tokens, shape.experts});
  saved.experts_Tk = allocator.tensor(DType::kI32, {tokens, shape.top_k});
  saved.weights_Tk = allocator.tensor(DType::kF32, {tokens, shape.top_k});
  saved.router_lse_T = allocator.tensor(DType::kF32, {tokens});
  saved.offsets_E1 = allocator.tensor(DType::kI64, {shape.experts + 1});
  saved.rows_E = allocator.tensor(DType::kI32, {shape.experts});
  saved.row_of_slot_N = allocator.tensor(DType::kI32, {slots});
  saved.slot_of_row_R = allocator.tensor(DType::kI32, {rows});
  saved.row_weights_R = allocator.tensor(DType::kF32, {rows});
  saved.gate_up_R2F = allocator.tensor(shape.type, {rows, 2 * shape.expert_width});
  saved.act_RF = allocator.tensor(shape.type, {rows, shape.expert_width});
  return saved;
}

MoeWorkspace allocate_moe_workspace(TensorAllocator& allocator, const MoeShape& shape, int64_t tokens,
                                    bool training) {
  const int64_t rows = shape.rows(tokens);
  MoeWorkspace workspace;
  workspace.logits_TE = allocator.tensor(DType::kF32, {tokens, shape.experts});
  workspace.x_RD = allocator.tensor(shape.type, {rows, shape.width});
  workspace.y_RD = allocator.tensor(shape.type, {rows, shape.width});
  if (training) {
    workspace.dact_RF = allocator.tensor(shape.type, {rows, shape.expert_width});
    workspace.dprobs_R = allocator.tensor(DType::kF32, {rows});
    workspace.dweights_Tk = allocator.tensor(DType::kF32, {tokens, shape.top_k});
    workspace.dlogits_TE = shape.type == DType::kF32 ? workspace.logits_TE
                                                     : allocator.tensor(shape.type, {tokens, shape.experts});
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
                      .rows_E = saved.rows_E,
                      .row_of_slot_N = saved.row_of_slot_N,
                      .slot_of_row_R = saved.slot_of_row_R,
                      .row_alignment = shape.row_alignment});
  permute(ctx, {.x_TD = x_TD,
                .slot_of_row_R = saved.slot_of_row_R,
                .y_RD = workspace.x_RD,
                .values_N = flat(saved.weights_Tk),
                .y_values_R = saved.row_weights_R,
                .top_k = shape.top_k});
  Experts experts(ctx, mode, saved, workspace);
  if (mode == ExpertFfnMode::kFusedGroupedMlp) {
    grouped_gate_up(ctx, {.x_RD = workspace.x_RD,
                          .w_E2FD = weights.gate_up_E2FD,
                          .gate_up_R2F = saved.gate_up_R2F,
                          .probs_R = saved.row_weights_R,
                          .act_RF = saved.act_RF,
                          .offsets_E1 = saved.offsets_E1,
                          .rows_E = saved.rows_E,
                          .interleave = shape.gate_up_interleave});
  } else {
    experts.run(Pass::kForward, workspace.x_RD, weights.gate_up_E2FD, saved.gate_up_R2F);
    scaled_swiglu_forward(ctx, {.gate_up_R2F = saved.gate_up_R2F,
                                .probs_R = saved.row_weights_R,
                                .act_RF = saved.act_RF,
                                .offsets_E1 = saved.offsets_E1,
                                .interleave = shape.gate_up_interleave});
  }
  experts.run(Pass::kForward, saved.act_RF, weights.down_EDF, workspace.y_RD);
  unpermute(ctx, {.y_RD = workspace.y_RD,
                  .row_of_slot_N = saved.row_of_slot_N,
                  .x_TD = y_TD,
                  .y_values_R = {},
                  .values_N = {},
                  .top_k = shape.top_k});
}

namespace {

// From dact's product to dgate_up and dprobs.
void experts_activation_backward(Context& ctx, ExpertFfnMode mode, const MoeShape& shape,
                                 const MoeWeights& weights, const MoeSaved& saved,
                                 const MoeWorkspace& workspace, Experts& experts) {
  if (mode == ExpertFfnMode::kFusedGroupedMlp) {
    grouped_down_backward(ctx, {.dy_RD = workspace.y_RD,
                                .w_EDF = weights.down_EDF,
                                .gate_up_R2F = saved.gate_up_R2F,
                                .probs_R = saved.row_weights_R,
                                .dact_RF = workspace.dact_RF,
                                .dgate_up_R2F = saved.gate_up_R2F,
                                .dprobs_R = workspace.dprobs_R,
                                .offsets_E1 = saved.offsets_E1,
                                .rows_E = saved.rows_E,
                                .interleave = shape.gate_up_interleave});
    return;
  }
  experts.run(Pass::kDgrad, workspace.dact_RF, weights.down_EDF, workspace.y_RD);
  scaled_swiglu_backward(ctx, {.dact_RF = workspace.dact_RF,
                               .gate_up_R2F = saved.gate_up_R2F,
                               .probs_R = saved.row_weights_R,
                               .dgate_up_R2F = saved.gate_up_R2F,
                               .dprobs_R = workspace.dprobs_R,
                               .offsets_E1 = saved.offsets_E1,
                               .interleave = shape.gate_up_interleave});
}

}  // namespace

void moe_backward(Context& ctx, ExpertFfnMode mode, const MoeShape& shape, const MoeWeights& weights,
                  const MoeWeights& gradients, const MoeSaved& saved, const MoeWorkspace& workspace,
                  const MoeBackward& args) {
  Experts experts(ctx, mode, saved, workspace);
  // The combine is a plain sum, so its gradient is a permutation of dy.
  permute(ctx, {.x_TD = args.dy_TD,
                .slot_of_row_R = saved.slot_of_row_R,
                .y_RD = workspace.y_RD,
                .values_N = {},
                .y_values_R = {},
                .top_k = shape.top_k});
  experts.run(Pass::kWgrad, saved.act_RF, gradients.down_EDF, workspace.y_RD, args.accumulate);
  experts_activation_backward(ctx, mode, shape, weights, saved, workspace, experts);
  // The permuted input is cheaper to gather again than to keep for every layer.
  permute(ctx, {.x_TD = args.x_TD,
                .slot_of_row_R = saved.slot_of_row_R,
                .y_RD = workspace.x_RD,
                .values_N = {},
                .y_values_R = {},
                .top_k = shape.top_k});
  experts.run(Pass::kWgrad, workspace.x_RD, gradients.gate_up_E2FD, saved.gate_up_R2F, args.accumulate);
  experts.run(Pass::kDgrad, workspace.x_RD, weights.gate_up_E2FD, saved.gate_up_R2F);
  unpermute(ctx, {.y_RD = workspace.x_RD,
                  .row_of_slot_N = saved.row_of_slot_N,
                  .x_TD = args.dx_TD,
                  .y_values_R = workspace.dprobs_R,
                  .values_N = flat(workspace.dweights_Tk),
                  .top_k = shape.top_k});
  router_backward(ctx, {.probs_TE = saved.probs_TE,
                        .experts_Tk = saved.experts_Tk,
                        .weights_Tk = saved.weights_Tk,
                        .lse_T = saved.router_lse_T,
                        .dweights_Tk = workspace.dweights_Tk,
                        .balance_E = args.balance_E,
                        .z_scale = args.z_scale,
                        .dlogits_TE = workspace.dlogits_TE});
  gemm(ctx, {.a = workspace.dlogits_TE,
             .b = args.x_TD,
             .c = gradients.gate_ED,
             .transpose_a = true,
             .accumulate = args.accumulate});
  gemm(ctx, {.a = workspace.dlogits_TE, .b = weights.gate_ED, .c = args.dx_TD, .accumulate = true});
}

}  // namespace biomoe
