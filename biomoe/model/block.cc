#include "biomoe/model/block.h"

#include <fmt/format.h>

#include "biomoe/ops/gemm.h"
#include "biomoe/ops/rms_norm.h"
#include "biomoe/ops/rope.h"

namespace biomoe {
namespace {

struct QkvBands {
  TensorView q, k, v;
};

QkvBands split_qkv(const TensorView& qkv_TC, const AttentionShape& shape) {
  const int64_t q = shape.num_heads * shape.head_dim, kv = shape.num_key_value_heads * shape.head_dim;
  return {qkv_TC.columns(0, q), qkv_TC.columns(q, kv), qkv_TC.columns(q + kv, kv)};
}

RopeArgs rope_of(const BlockInputs& inputs, TensorView x_TC, bool inverse) {
  return {.x_TC = x_TC,
          .positions_T = inputs.positions_T,
          .cos_SK2 = inputs.cos_SK2,
          .sin_SK2 = inputs.sin_SK2,
          .num_heads = inputs.attention.num_heads + inputs.attention.num_key_value_heads,
          .head_dim = inputs.attention.head_dim,
          .inverse = inverse};
}

// The products of a projection y = x w^T, with quantised operands where the quantizer says so.
void project(Context& ctx, const OperandQuantizer& quantizer, TensorView x, TensorView w, TensorView y) {
  GemmArgs args{.a = x, .b = w, .c = y, .transpose_b = true};
  if (quantizer.native(x.shape[0])) {
    args.codes = quantizer.native_forward(ctx, x, {});
  } else if (quantizer.native_mx(x.shape[0])) {
    args.mx_codes = quantizer.mx_forward(ctx, x, w, {});
  } else if (quantizer) {
    args.a = quantizer.matrix(ctx, Operand::kActivation, false, x);
    args.b = quantizer.matrix(ctx, Operand::kWeight, false, w);
  }
  gemm(ctx, args);
}

struct Projection {
  TensorView x, w, dw;
};

void project_backward(Context& ctx, const OperandQuantizer& quantizer, TensorView dy, const Projection& of,
                      TensorView dx, bool accumulate) {
  GemmArgs wgrad{.a = dy, .b = of.x, .c = of.dw, .transpose_a = true, .accumulate = accumulate};
  GemmArgs dgrad{.a = dy, .b = of.w, .c = dx};
  const bool native = quantizer.native(dy.shape[0]), mx = quantizer.native_mx(dy.shape[0]);
  if (native) {
    const auto codes = quantizer.native_backward(ctx, dy, of.x, {});
    wgrad.column_codes = codes.wgrad;
    dgrad.codes = codes.dgrad;
  } else if (mx) {
    wgrad.mx_codes = quantizer.mx_wgrad(ctx, dy, of.x, {});
  } else if (quantizer) {
    wgrad.a = quantizer.matrix(ctx, Operand::kGradient, true, dy);
    wgrad.b = quantizer.matrix(ctx, Operand::kActivation, true, of.x);
  }
  gemm(ctx, wgrad);
  if (mx) {
    dgrad.mx_codes = quantizer.mx_dgrad(ctx, dy, of.w, {});
  } else if (quantizer && !native) {  // in the memory that wgrad's operands had
    dgrad.a = quantizer.matrix(ctx, Operand::kGradient, false, dy);
    dgrad.b = quantizer.matrix(ctx, Operand::kWeight, true, of.w);
  }
  gemm(ctx, dgrad);
}

}  // namespace

BlockWeights block_weights(const ParameterList& parameters, const ModelConfig& config, TensorView arena_A,
                           int64_t layer) {
  auto view = [&](const char* name) {
    return ParameterList::held_view(arena_A, parameters.find(fmt::format("model.layers.{}.{}", layer, name)));
  };
  BlockWeights weights;
  weights.norm1_D = view("input_layernorm.weight");
  // q, k and v lie one after the other in the arena (see ParameterList).
  weights.qkv_CD = TensorView(view("self_attn.q_proj.weight").data, arena_A.dtype,
                              Shape{config.qkv_width(), config.hidden_size});
  weights.out_DA = view("self_attn.o_proj.weight");
  weights.norm2_D = view("post_attention_layernorm.weight");
  weights.moe.gate_ED = view("mlp.gate.weight");
  weights.moe.gate_up_E2FD = view("mlp.experts.gate_up_proj");
  weights.moe.down_EDF = view("mlp.experts.down_proj");
  return weights;
}

void set_gradient_squares(const ParameterList& parameters, std::span<const TensorView> squares, int64_t layer,
                          BlockWeights& gradients) {
  const auto squares_of = [&](const char* name) {
    const ParamSpec& spec = parameters.find(fmt::format("model.layers.{}.{}", layer, name));
    return squares[parameters.index_of(spec)];
  };
  gradients.moe.gate_up_squares_P = squares_of("mlp.experts.gate_up_proj");
  gradients.moe.down_squares_P = squares_of("mlp.experts.down_proj");
}

MoeShape moe_shape(const ModelConfig& config, const ComputeTypes& types, const ExpertSplit& split) {
  return {.width = config.hidden_size,
          .expert_width = config.intermediate_size,
          .experts = config.num_local_experts,
          .top_k = config.num_experts_per_tok,
          .type = types.activation,
          .row_alignment = types.row_alignment,
          .gate_up_interleave = types.gate_up_interleave,
          .split = split};
}

AttentionShape attention_shape(const ModelConfig& config, int64_t max_seqlen) {
  return {.num_heads = config.num_attention_heads,
          .num_key_value_heads = config.num_key_value_heads,
          .head_dim = config.key_width(),
          .max_seqlen = max_seqlen,
          .window = config.sliding_window};
}

BlockSaved allocate_block_saved(TensorAllocator& allocator, const ModelConfig& config,
                                const ComputeTypes& types, int64_t tokens, const ExpertSplit& split,
                                ExpertsKeep keep) {
  const int64_t T = tokens, D = config.hidden_size, A = config.num_attention_heads * config.key_width();
  BlockSaved saved;
  saved.norm1_TD = allocator.tensor(types.activation, {T, D});
  saved.rstd1_T = allocator.tensor(DType::kF32, {T});
  saved.qkv_TC = allocator.tensor(types.activation, {T, config.qkv_width()});
  saved.attn_TA = allocator.tensor(types.activation, {T, A});
  saved.lse_HT = allocator.tensor(DType::kF32, {config.num_attention_heads, T});
  saved.mid_TD = allocator.tensor(types.activation, {T, D});
  saved.norm2_TD = allocator.tensor(types.activation, {T, D});
  saved.rstd2_T = allocator.tensor(DType::kF32, {T});
  saved.moe = allocate_moe_saved(allocator, moe_shape(config, types, split), T, keep);
  return saved;
}

BlockWorkspace allocate_block_workspace(TensorAllocator& allocator, const ModelConfig& config,
                                        const ComputeTypes& types, int64_t tokens, bool training,
                                        const ExpertSplit& split, bool passes_codes) {
  BlockWorkspace workspace;
  workspace.delta_TD = allocator.tensor(types.activation, {tokens, config.hidden_size});
  if (training) {
    workspace.dnorm_TD = allocator.tensor(types.activation, {tokens, config.hidden_size});
    workspace.dattn_TA =
        allocator.tensor(types.activation, {tokens, config.num_attention_heads * config.key_width()});
    workspace.dqkv_TC = allocator.tensor(types.activation, {tokens, config.qkv_width()});
  }
  workspace.moe =
      allocate_moe_workspace(allocator, moe_shape(config, types, split), tokens, training, passes_codes);
  return workspace;
}

void block_attention_forward(Context& ctx, const BlockInputs& inputs, const BlockWeights& weights,
                             TensorView previous_mid_TD, const BlockSaved& saved,
                             const BlockWorkspace& workspace) {
  rms_norm_forward(ctx, {.x_TD = previous_mid_TD ? workspace.delta_TD : saved.x_TD,
                         .residual_TD = previous_mid_TD,
                         .weight_D = weights.norm1_D,
                         .sum_TD = previous_mid_TD ? saved.x_TD : TensorView(),
                         .y_TD = saved.norm1_TD,
                         .rstd_T = saved.rstd1_T,
                         .eps = inputs.rms_norm_eps});
  project(ctx, weights.qkv_quantizer, saved.norm1_TD, weights.qkv_CD, saved.qkv_TC);
  rope(ctx, rope_of(inputs, saved.qkv_TC, false));
  const QkvBands bands = split_qkv(saved.qkv_TC, inputs.attention);
  attention_forward(ctx, {.shape = inputs.attention,
                          .q_TC = bands.q,
                          .k_TC = bands.k,
                          .v_TC = bands.v,
                          .cu_seqlens_B1 = inputs.cu_seqlens_B1,
                          .out_TC = saved.attn_TA,
                          .lse_HT = saved.lse_HT});
  project(ctx, weights.out_quantizer, saved.attn_TA, weights.out_DA, workspace.delta_TD);
  rms_norm_forward(ctx, {.x_TD = workspace.delta_TD,
                         .residual_TD = saved.x_TD,
                         .weight_D = weights.norm2_D,
                         .sum_TD = saved.mid_TD,
                         .y_TD = saved.norm2_TD,
                         .rstd_T = saved.rstd2_T,
                         .eps = inputs.rms_norm_eps});
}

void block_experts_forward(Context& ctx, const BlockInputs& inputs, const BlockWeights& weights,
                           const BlockSaved& saved, const BlockWorkspace& workspace,
                           const LayerRoutingStats& stats, bool route_only) {
  if (route_only) {
    moe_route(ctx, weights.moe, saved.norm2_TD, saved.moe, workspace.moe, stats);
    return;
  }
  moe_forward(ctx, inputs.expert_ffn_mode, inputs.moe, weights.moe, saved.norm2_TD, saved.moe, workspace.moe,
              stats, workspace.delta_TD);
}

void block_experts_backward(Context& ctx, const BlockInputs& inputs, const BlockWeights& weights,
                            const BlockWeights& gradients, const BlockSaved& saved,
                            const BlockWorkspace& workspace, const BlockAuxGradient& aux,
                            TensorView dstream_TD, bool accumulate) {
  moe_backward(ctx, inputs.expert_ffn_mode, inputs.moe, weights.moe, gradients.moe, saved.moe, workspace.moe,
               {.x_TD = saved.norm2_TD,
                .dy_TD = dstream_TD,
                .dx_TD = workspace.dnorm_TD,
                .balance_E = aux.balance_E,
                .z_scale = aux.z_scale,
                .accumulate = accumulate});
}

void block_attention_backward(Context& ctx, const BlockInputs& inputs, const BlockWeights& weights,
                              const BlockWeights& gradients, const BlockSaved& saved,
                              const BlockWorkspace& workspace, TensorView dstream_TD, bool accumulate) {
  rms_norm_backward(ctx, {.dy_TD = workspace.dnorm_TD,
                          .sum_TD = saved.mid_TD,
                          .weight_D = weights.norm2_D,
                          .rstd_T = saved.rstd2_T,
                          .dresidual_TD = dstream_TD,
                          .dx_TD = dstream_TD,
                          .dweight_D = gradients.norm2_D,
                          .accumulate = accumulate});
  project_backward(ctx, weights.out_quantizer, dstream_TD, {saved.attn_TA, weights.out_DA, gradients.out_DA},
                   workspace.dattn_TA, accumulate);
  const QkvBands bands = split_qkv(saved.qkv_TC, inputs.attention);
  const QkvBands dbands = split_qkv(workspace.dqkv_TC, inputs.attention);
  attention_backward(ctx, {.shape = inputs.attention,
                           .q_TC = bands.q,
                           .k_TC = bands.k,
                           .v_TC = bands.v,
                           .cu_seqlens_B1 = inputs.cu_seqlens_B1,
                           .out_TC = saved.attn_TA,
                           .lse_HT = saved.lse_HT,
                           .dout_TC = workspace.dattn_TA,
                           .dq_TC = dbands.q,
                           .dk_TC = dbands.k,
                           .dv_TC = dbands.v});
  rope(ctx, rope_of(inputs, workspace.dqkv_TC, true));
  project_backward(ctx, weights.qkv_quantizer, workspace.dqkv_TC,
                   {saved.norm1_TD, weights.qkv_CD, gradients.qkv_CD}, workspace.dnorm_TD, accumulate);
  rms_norm_backward(ctx, {.dy_TD = workspace.dnorm_TD,
                          .sum_TD = saved.x_TD,
                          .weight_D = weights.norm1_D,
                          .rstd_T = saved.rstd1_T,
                          .dresidual_TD = dstream_TD,
                          .dx_TD = dstream_TD,
                          .dweight_D = gradients.norm1_D,
                          .accumulate = accumulate});
}

}  // namespace biomoe
