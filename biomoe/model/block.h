// One transformer block: norm -> attention -> residual -> norm -> mixture of experts. Forward, then backward
// under it.
#pragma once

#include <span>

#include "biomoe/core/arena.h"
#include "biomoe/core/context.h"
#include "biomoe/model/compute_types.h"
#include "biomoe/model/model_config.h"
#include "biomoe/model/parameters.h"
#include "biomoe/moe/moe_layer.h"
#include "biomoe/ops/attention.h"

namespace biomoe {

// The block's parameters, or their gradients.
struct BlockWeights {
  TensorView norm1_D;
  TensorView qkv_CD;  // q, k and v projections as one matrix, C = (H + 2G) * K
  TensorView out_DA;  // A = H * K
  TensorView norm2_D;
  MoeWeights moe;
  OperandQuantizer qkv_quantizer{}, out_quantizer{};  // of the weights, not of their gradients
};
BlockWeights block_weights(const ParameterList& parameters, const ModelConfig& config, TensorView arena_A,
                           int64_t layer);
// Gives the layer's gradients their places for sums of squares, `squares` being one view a parameter.
void set_gradient_squares(const ParameterList& parameters, std::span<const TensorView> squares, int64_t layer,
                          BlockWeights& gradients);

// What forward leaves for backward. The residual stream enters as x and becomes mid = x +
// attention(norm1(x)); the block's other output, delta = moe(norm2(mid)), is added by whatever norm comes
// next.
struct BlockSaved {
  TensorView x_TD;
  TensorView norm1_TD;
  TensorView rstd1_T;
  TensorView qkv_TC;  // after the rotary embedding
  TensorView attn_TA;
  TensorView lse_HT;
  TensorView mid_TD;
  TensorView norm2_TD;
  TensorView rstd2_T;
  MoeSaved moe;
};
// Everything but x_TD, which outlives a recomputed block. `keep`: as of allocate_moe_saved.
BlockSaved allocate_block_saved(TensorAllocator& allocator, const ModelConfig& config,
                                const ComputeTypes& types, int64_t tokens, const ExpertSplit& split = {},
                                ExpertsKeep keep = {});

// Shared by all blocks.
struct BlockWorkspace {
  TensorView delta_TD;
  TensorView dnorm_TD;  // backward only, as the next two
  TensorView dattn_TA;
  TensorView dqkv_TC;
  MoeWorkspace moe;
};
BlockWorkspace allocate_block_workspace(TensorAllocator& allocator, const ModelConfig& config,
                                        const ComputeTypes& types, int64_t tokens, bool training,
                                        const ExpertSplit& split = {}, bool passes_codes = false);

// What is the same for every block of one batch.
struct BlockInputs {
  AttentionShape attention;
  MoeShape moe;
  ExpertFfnMode expert_ffn_mode = ExpertFfnMode::kGroupedLinear;
  double rms_norm_eps = 1e-5;
  TensorView cos_SK2, sin_SK2;
  TensorView positions_T;
  TensorView cu_seqlens_B1;
};
MoeShape moe_shape(const ModelConfig& config, const ComputeTypes& types, const ExpertSplit& split = {});
AttentionShape attention_shape(const ModelConfig& config, int64_t max_seqlen);

// The forward pass of a block: attention, then experts, whose weights are read by the second alone.
// Where the block's input stream is: already in saved.x_TD (mid absent), or still mid + delta of the block
// before it (delta is then read from workspace.delta_TD), to be summed into saved.x_TD.
void block_attention_forward(Context& ctx, const BlockInputs& inputs, const BlockWeights& weights,
                             TensorView previous_mid_TD, const BlockSaved& saved,
                             const BlockWorkspace& workspace);
// route_only stops after the router: saved.moe holds the routing and delta is not written.
void block_experts_forward(Context& ctx, const BlockInputs& inputs, const BlockWeights& weights,
                           const BlockSaved& saved, const BlockWorkspace& workspace,
                           const LayerRoutingStats& stats, bool route_only = false);

struct BlockAuxGradient {
  TensorView balance_E;
  double z_scale = 0;
};
// Backward: experts, then attention. dstream_TD holds the gradient of (mid + delta) on entry of the first and
// of x on return of the second. The parameters' gradients are assigned, or added to where accumulate; those
// of the experts are complete after the first.
void block_experts_backward(Context& ctx, const BlockInputs& inputs, const BlockWeights& weights,
                            const BlockWeights& gradients, const BlockSaved& saved,
                            const BlockWorkspace& workspace, const BlockAuxGradient& aux,
                            TensorView dstream_TD, bool accumulate);
void block_attention_backward(Context& ctx, const BlockInputs& inputs, const BlockWeights& weights,
                              const BlockWeights& gradients, const BlockSaved& saved,
                              const BlockWorkspace& workspace, TensorView dstream_TD, bool accumulate);

}  // namespace biomoe
