// The one list of operations. An op is `void name(Context&, const Args&)`: ops/<file>.cc validates the
// arguments and calls the backend of ctx.device; backend/cpu and backend/cuda define it; backend/no_cuda
// throws for all of them.
#pragma once

#define BIOMOE_FOR_EACH_OP(X)                                    \
  X(gemm, GemmArgs)                                              \
  X(embedding_forward, EmbeddingForwardArgs)                     \
  X(embedding_backward, EmbeddingBackwardArgs)                   \
  X(rms_norm_forward, RmsNormForwardArgs)                        \
  X(rms_norm_backward, RmsNormBackwardArgs)                      \
  X(rope, RopeArgs)                                              \
  X(attention_forward, AttentionForwardArgs)                     \
  X(attention_backward, AttentionBackwardArgs)                   \
  X(attention_decode, AttentionDecodeArgs)                       \
  X(router_forward, RouterForwardArgs)                           \
  X(router_backward, RouterBackwardArgs)                         \
  X(dispatch_plan, DispatchPlanArgs)                             \
  X(permute, PermuteArgs)                                        \
  X(unpermute, UnpermuteArgs)                                    \
  X(peer_plan, PeerPlanArgs)                                     \
  X(send_rows, SendRowsArgs)                                     \
  X(fetch_rows, FetchRowsArgs)                                   \
  X(zero_padding, ZeroPaddingArgs)                               \
  X(grouped_gemm_forward, GroupedGemmArgs)                       \
  X(grouped_gemm_dgrad, GroupedGemmArgs)                         \
  X(grouped_gemm_wgrad, GroupedGemmArgs)                         \
  X(scaled_swiglu_forward, ScaledSwigluForwardArgs)              \
  X(scaled_swiglu_backward, ScaledSwigluBackwardArgs)            \
  X(scaled_swiglu_codes_forward, ScaledSwigluCodesForwardArgs)   \
  X(scaled_swiglu_codes_backward, ScaledSwigluCodesBackwardArgs) \
  X(grouped_gate_up, GroupedGateUpArgs)                          \
  X(grouped_down_backward, GroupedDownBackwardArgs)              \
  X(cross_entropy, CrossEntropyArgs)                             \
  X(loss_sums, LossSumsArgs)                                     \
  X(balance_loss, BalanceLossArgs)                               \
  X(sum_squares, SumSquaresArgs)                                 \
  X(clip_factor, ClipFactorArgs)                                 \
  X(adamw, AdamwArgs)                                            \
  X(quantize, QuantizeArgs)                                      \
  X(update_delayed_scales, UpdateDelayedScalesArgs)              \
  X(write_mx_weights, WriteMxWeightsArgs)                        \
  X(turn_mx_weights, TurnMxWeightsArgs)                          \
  X(fill_zero, FillZeroArgs)                                     \
  X(count_nonfinite, CountNonfiniteArgs)

namespace biomoe {

struct Context;

#define BIOMOE_DECLARE_ARGS(name, Args) struct Args;
BIOMOE_FOR_EACH_OP(BIOMOE_DECLARE_ARGS)
#undef BIOMOE_DECLARE_ARGS

#define BIOMOE_DECLARE_OP(name, Args) void name(Context& ctx, const Args& args);
BIOMOE_FOR_EACH_OP(BIOMOE_DECLARE_OP)
namespace cpu {
BIOMOE_FOR_EACH_OP(BIOMOE_DECLARE_OP)
}
namespace cuda {
BIOMOE_FOR_EACH_OP(BIOMOE_DECLARE_OP)
}
#undef BIOMOE_DECLARE_OP

}  // namespace biomoe
