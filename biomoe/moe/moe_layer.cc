#include "biomoe/moe/moe_layer.h"

#include "biomoe/moe/dispatcher.h"
#include "biomoe/moe/peer_exchange.h"
#include "biomoe/moe/sequential.h"
#include "biomoe/ops/device.h"
#include "biomoe/ops/gemm.h"
#include "biomoe/ops/router.h"
#include "biomoe/quant/compact_bf16.h"

namespace biomoe {
namespace {

// Two linear maps with the activation between them, over the rows of the saved plan.
Sequential expert_layers(const Context& ctx, ExpertFfnMode mode, const MoeShape& shape,
                         const MoeWeights& weights, const MoeWeights& gradients) {
  const GroupedProduct product =
      mode == ExpertFfnMode::kLoop ? GroupedProduct::kLoop : GroupedProduct::kGrouped;
  return Sequential(ctx.device, shape.type,
                    {GroupedLinear{.w_EOI = weights.gate_up_E2FD,
                                   .dw_EOI = gradients.gate_up_E2FD,
                                   .squares_P = gradients.gate_up_squares_P,
                                   .product = product,
                                   .quantizer = weights.gate_up_quantizer},
                     ScaledSwiGLU{.interleave = shape.gate_up_interleave},
                     GroupedLinear{.w_EOI = weights.down_EDF,
                                   .dw_EOI = gradients.down_EDF,
                                   .squares_P = gradients.down_squares_P,
                                   .product = product,
                                   .quantizer = weights.down_quantizer}},
                    mode == ExpertFfnMode::kFusedGroupedMlp ? Fusion::kRequired : Fusion::kOff);
}

SequentialMemory expert_memory(const Sequential& layers, const MoeSaved& saved,
                               const MoeWorkspace& workspace) {
  SequentialMemory memory;
  memory.gradient[1] = workspace.dact_RF;
  if (layers.codes_at(0)) {
    memory.hidden[0] = workspace.gate_up_R2F;
    memory.kept[0] = saved.kept_RC;
  } else {
    memory.hidden[0] = memory.gradient[0] = saved.gate_up_R2F;
    memory.hidden[1] = saved.act_RF;
  }
  return memory;
}

// For a loop over experts the host must know the routing: it waits for the offsets (sync).
ExpertRows expert_rows(Context& ctx, ExpertFfnMode mode, const MoeSaved& saved,
                       const MoeWorkspace& workspace) {
  ExpertRows rows{.offsets_E1 = saved.offsets_E1, .rows_E = saved.rows_E};
  if (mode != ExpertFfnMode::kLoop || ctx.device == Device::kCpu) return rows;
  rows.offsets_host_E1 = workspace.offsets_host_E1;
  copy_to_host(ctx, rows.offsets_host_E1.data, saved.offsets_E1.data, saved.offsets_E1.bytes());
  device_wait_sync(ctx);
  return rows;
}

}  // namespace

MoeSaved allocate_moe_saved(TensorAllocator& allocator, const MoeShape& shape, int64_t tokens,
                            ExpertsKeep keep) {
  const int64_t rows = shape.rows(tokens);
  MoeSaved saved;
  saved.probs_TE = allocator.tensor(DType::kF32, {tokens, shape.experts});
  saved.experts_Tk = allocator.tensor(DType::kI32, {tokens, shape.top_k});
  saved.weights_Tk = allocator.tensor(DType::kF32, {tokens, shape.top_k});
  saved.router_lse_T = allocator.tensor(DType::kF32, {tokens});
  allocate_dispatch_saved(allocator, shape, tokens, saved);
  saved.row_weights_R = allocator.tensor(DType::kF32, {rows});
  if (keep.values) {
    saved.gate_up_R2F = allocator.tensor(shape.type, {rows, 2 * shape.expert_width});
    saved.act_RF = allocator.tensor(shape.type, {rows, shape.expert_width});
  }
  if (keep.compact) {
    const Shape kept{rows, CompactLayout::row_bytes(shape.expert_width)};
    saved.kept_RC = keep.values ? TensorView(saved.gate_up_R2F.data, DType::kU8, kept)
                                : allocator.tensor(DType::kU8, kept);
  }
  return saved;
}

MoeWorkspace allocate_moe_workspace(TensorAllocator& allocator, const MoeShape& shape, int64_t tokens,
                                    bool training, bool passes_codes) {
  const int64_t rows = shape.rows(tokens), width = shape.expert_width;
  MoeWorkspace workspace;
  workspace.logits_TE = allocator.tensor(DType::kF32, {tokens, shape.experts});
  allocate_dispatch_workspace(allocator, shape, tokens, workspace);
  if (!shape.split.shared_memory) {
    workspace.x_RD = workspace.dx_RD = allocator.tensor(shape.type, {rows, shape.width});
    workspace.y_RD = workspace.dy_RD = allocator.tensor(shape.type, {rows, shape.width});
    if (training) workspace.dprobs_R = allocator.tensor(DType::kF32, {rows});
  } else if (shape.split.peers) {
    const PeerExchange::Buffers& own = shape.split.peers->own();
    workspace.x_RD = own.x_RD;
    workspace.dy_RD = own.dy_RD;
    workspace.y_RD = workspace.dx_RD = own.results_RD;
    workspace.dprobs_R = own.dweights_R;
  }
  if (passes_codes) workspace.gate_up_R2F = allocator.tensor(shape.type, {rows, 2 * width});
  if (training) {
    workspace.dact_RF = passes_codes ? TensorView(workspace.gate_up_R2F.data, shape.type, Shape{rows, width})
                                     : allocator.tensor(shape.type, {rows, width});
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
  Dispatcher dispatcher(ctx, shape, saved, workspace);
  dispatcher.plan();
  dispatcher.rows_to_experts(x_TD, workspace.x_RD, saved.row_weights_R);
  const Sequential layers = expert_layers(ctx, mode, shape, weights, {});
  layers.forward(ctx, expert_rows(ctx, mode, saved, workspace), workspace.x_RD, saved.row_weights_R,
                 expert_memory(layers, saved, workspace), workspace.y_RD);
  dispatcher.to_tokens(workspace.y_RD, y_TD);
}

void moe_backward(Context& ctx, ExpertFfnMode mode, const MoeShape& shape, const MoeWeights& weights,
                  const MoeWeights& gradients, const MoeSaved& saved, const MoeWorkspace& workspace,
                  const MoeBackward& args) {
  Dispatcher dispatcher(ctx, shape, saved, workspace);
  // The permuted input is cheaper to gather again than to keep for every layer. The combine is a plain sum,
  // so its gradient is a permutation of dy.
  dispatcher.gradients_to_experts(args.x_TD, workspace.x_RD, args.dy_TD, workspace.dy_RD);
  const Sequential layers = expert_layers(ctx, mode, shape, weights, gradients);
  layers.backward(ctx, expert_rows(ctx, mode, saved, workspace), expert_memory(layers, saved, workspace),
                  {.x_RI = workspace.x_RD,
                   .dy_RO = workspace.dy_RD,
                   .dx_RI = workspace.dx_RD,
                   .scales_R = saved.row_weights_R,
                   .dscales_R = workspace.dprobs_R,
                   .accumulate = args.accumulate});
  dispatcher.to_tokens(workspace.dx_RD, args.dx_TD, workspace.dprobs_R, workspace.dweights_Tk);
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
