// Rows to the experts of other ranks and back, through memory that the ranks of a host share: a row goes from
// where the token is straight to its place in the order of experts of the rank that holds its expert, and the
// experts' output is read where it was computed. Nothing here waits for another rank; between a send and what
// reads the rows, and between the experts and a fetch, the caller must let all ranks meet.
//
// P ranks hold E / P experts each, rank p those from p E / P on. Slots are as in ops/dispatch.h.
#pragma once

#include <span>

#include "biomoe/core/context.h"
#include "biomoe/core/tensor_view.h"
#include "biomoe/ops/op_list.h"

namespace biomoe {

inline constexpr int64_t kMostPeers = 16;

// Where this rank's slots go, and where the rows of the experts held here lie: by expert, then by the rank
// that sends them, then in the order of that rank's slots, each expert padded to row_alignment.
struct PeerPlanArgs {
  TensorView experts_Tk;  // i32, of this rank's slots
  TensorView begins_E1;   // i64, of a dispatch_plan of them with row_alignment 1
  TensorView counts_PE;   // i32: rows that each rank sends to each expert
  int64_t rank = 0;       // this one
  int64_t row_alignment = 1;
  TensorView row_of_slot_N;  // i32, from that dispatch_plan; becomes the row on the rank of the slot's expert
  TensorView offsets_E1;     // i64 [E / P + 1], assigned: of the experts held here
  TensorView rows_E;         // i32 [E / P], assigned
};

// On the rank of each slot's expert: y[row_of_slot[s]] = x[s / k]; with values, also y_values[row_of_slot[s]]
// = values[s].
struct SendRowsArgs {
  TensorView x_TD;
  TensorView experts_Tk;
  TensorView row_of_slot_N;
  std::span<const TensorView> y_PRD;  // of every rank, [R, D]
  TensorView values_N{};              // optional f32
  std::span<const TensorView> y_values_PR{};
  int64_t held_experts = 1;  // E / P
};

// x[t] = sum over j, in order, of y[row_of_slot[t*k + j]] on the rank of that slot's expert; with values,
// also values[s] = y_values[row_of_slot[s]] there.
struct FetchRowsArgs {
  std::span<const TensorView> y_PRD;
  TensorView experts_Tk;
  TensorView row_of_slot_N;
  TensorView x_TD;  // assigned
  std::span<const TensorView> y_values_PR{};
  TensorView values_N{};
  int64_t held_experts = 1;
};

// Rows [offsets[e] + rows[e], offsets[e+1]) of x become zeros, and of the values where they are.
struct ZeroPaddingArgs {
  TensorView x_RD;
  TensorView values_R{};  // optional f32
  TensorView offsets_E1;
  TensorView rows_E;
};

}  // namespace biomoe
