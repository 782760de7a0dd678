// The mixture-of-experts feed-forward layer: router -> dispatch plan -> permutation -> experts -> combine.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "biomoe/core/arena.h"
#include "biomoe/core/context.h"
#include "biomoe/dist/comm.h"
#include "biomoe/moe/operand_quantizer.h"
#include "biomoe/moe/routing_stats.h"
#include "biomoe/ops/dispatch.h"

namespace biomoe {

// How the experts' products run: one GEMM per expert (the baseline to compare with), one grouped GEMM, or
// grouped GEMMs fused with the activation between them (see Sequential).
enum class ExpertFfnMode : uint8_t { kLoop, kGroupedLinear, kFusedGroupedMlp };
inline constexpr std::array<std::string_view, 3> kExpertFfnModeNames{"loop", "grouped_linear",
                                                                     "fused_grouped_mlp"};

class PeerExchange;

// How the experts are split over ranks.
struct ExpertSplit {
  int64_t ranks = 1;
  int64_t max_tokens = 0;               // of any of these ranks in a batch; for ranks > 1
  Comm* comm = nullptr;                 // these ranks; needed to run, not to plan
  bool shared_memory = false;           // rows go through memory that these ranks share, and not in messages
  const PeerExchange* peers = nullptr;  // with shared_memory; needed to run, not to plan
  TensorAllocator* host = nullptr;      // with messages off the CPU: for what the host knows of them
};

struct MoeShape {
  int64_t width = 0;               // D
  int64_t expert_width = 0;        // F
  int64_t experts = 0;             // E
  int64_t top_k = 0;               // k
  DType type = DType::kF32;        // of activations
  int64_t row_alignment = 1;       // see DispatchPlanArgs
  int64_t gate_up_interleave = 0;  // see ops/scaled_swiglu.h
  ExpertSplit split{};
  int64_t held_experts() const { return experts / split.ranks; }  // e
  // R: room for the rows of this rank's experts, whatever the routing. A token goes to an expert once.
  int64_t rows(int64_t tokens) const {
    if (split.ranks == 1) return row_capacity(tokens * top_k, experts, row_alignment);
    const int64_t of_a_token = top_k < held_experts() ? top_k : held_experts();
    return row_capacity(split.ranks * split.max_tokens * of_a_token, held_experts(), row_alignment);
  }
};

// The layer's parameters and how products quantise their operands, or their gradients (same shapes).
struct MoeWeights {
  TensorView gate_ED;
  TensorView gate_up_E2FD;  // gate rows first
  TensorView down_EDF;
  TensorView gate_up_squares_P{}, down_squares_P{};  // of gradients only: see GroupedGemmArgs::squares_P
  OperandQuantizer gate_up_quantizer{}, down_quantizer{};  // of the weights, not of their gradients
};

// What the host knows of messages between ranks: where the rows of a batch go and come from. Absent where
// there are none.
struct MessageTables {
  TensorView send_E3;     // i64, as RowSegment: to each expert of all, in order
  TensorView receive_E3;  // i64: from each rank for each expert held here, rank by rank
  TensorView sent_E;      // i32: rows to each expert of all
  TensorView offsets_E1;  // i64, as MoeSaved's
  TensorView rows_E;      // i32
};

// On the way to and from other ranks; absent where experts are not split.
struct DispatchWorkspace {
  TensorView rows_ND;        // in the order of all experts; as the next, for messages only
  TensorView values_N;       // f32
  TensorView offsets_E1;     // i64, of all experts
  TensorView rows_E;         // i32
  TensorView slot_of_row_N;  // i32, for shared memory only
  // On the host, for messages only:
  TensorView counts_2E;   // i64: rows sent to each expert; rows received from each rank for each expert here
  TensorView by_rank_P3;  // i64, as RowSegment: one row from and to each rank
};

// What forward leaves for backward, for T tokens, N = T*k slots and R rows.
struct MoeSaved {
  TensorView probs_TE;    // router softmax
  TensorView experts_Tk;  // i32
  TensorView weights_Tk;  // renormalised routing weights
  TensorView router_lse_T;
  TensorView offsets_E1;     // i64, first row of each expert held here
  TensorView rows_E;         // i32
  TensorView row_of_slot_N;  // i32; where experts are split, rows here are those that this rank sends, or
                             // with shared memory those of the rank that holds the expert
  TensorView slot_of_row_R;  // i32; likewise; absent with shared memory
  MessageTables messages;
  TensorView row_weights_R;  // routing weights in row order
  // Of experts that hand values on, and of those that hand on codes: see ExpertsKeep.
  TensorView gate_up_R2F;  // overwritten by backward
  TensorView act_RF;       // silu(gate) * up * weight
  TensorView kept_RC;      // u8: SequentialMemory::kept
};
// What is kept of experts from forward to backward, by the layers that have this memory: the values between
// their products, or where codes are passed on (see Sequential::codes_at) gate and up in fewer bits. Where
// there are layers of both kinds, which have the memory in turn, the latter lie in that of the former.
struct ExpertsKeep {
  bool values = true;
  bool compact = false;
};
MoeSaved allocate_moe_saved(TensorAllocator& allocator, const MoeShape& shape, int64_t tokens,
                            ExpertsKeep keep = {});

// Memory shared by all layers, free between calls.
struct MoeWorkspace {
  TensorView logits_TE;  // f32 router logits
  DispatchWorkspace dispatch;
  TensorView x_RD;             // rows in expert order
  TensorView y_RD;             // rows out of the experts
  TensorView dy_RD;            // gradients into the experts; may be y_RD
  TensorView dx_RD;            // gradients out of the experts; may be x_RD
  TensorView gate_up_R2F;      // forward only, where any layer passes codes on
  TensorView dact_RF;          // backward only; may lie in gate_up
  TensorView dprobs_R;         // backward only
  TensorView dweights_Tk;      // backward only
  TensorView dlogits_TE;       // backward only; may be logits_TE
  TensorView offsets_host_E1;  // ExpertFfnMode::kLoop off the CPU: where the host reads offsets; set by the
                               // owner, not allocated
};
// `passes_codes`: whether any layer does (see Sequential::codes_at).
MoeWorkspace allocate_moe_workspace(TensorAllocator& allocator, const MoeShape& shape, int64_t tokens,
                                    bool training, bool passes_codes = false);

// One layer's share of RoutingStats.
struct LayerRoutingStats {
  TensorView counts_E, prob_sums_E, z_sum_1;
};

// y_TD = mixture of the experts of x_TD (assigned). Statistics are accumulated.
void moe_forward(Context& ctx, ExpertFfnMode mode, const MoeShape& shape, const MoeWeights& weights,
                 TensorView x_TD, const MoeSaved& saved, const MoeWorkspace& workspace,
                 const LayerRoutingStats& stats, TensorView y_TD);

// Router alone, for counting: fills the routing part of `saved` and accumulates the statistics.
void moe_route(Context& ctx, const MoeWeights& weights, TensorView x_TD, const MoeSaved& saved,
               const MoeWorkspace& workspace, const LayerRoutingStats& stats);

struct MoeBackward {
  TensorView x_TD;  // what forward read
  TensorView dy_TD;
  TensorView dx_TD;         // assigned
  TensorView balance_E;     // gradient of the load-balancing loss per probability (f32)
  double z_scale = 0;       // factor of lse^2 in the loss
  bool accumulate = false;  // add to the parameters' gradients instead of assigning them
};
void moe_backward(Context& ctx, ExpertFfnMode mode, const MoeShape& shape, const MoeWeights& weights,
                  const MoeWeights& gradients, const MoeSaved& saved, const MoeWorkspace& workspace,
                  const MoeBackward& args);

}  // namespace biomoe
