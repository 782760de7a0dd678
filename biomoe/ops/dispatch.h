// From routing decisions to expert-ordered rows and back. N = T*k slots; slot (t, j) has number t*k + j. R >=
// N rows are room for every expert's rows padded to a multiple of row_alignment.
#pragma once

#include "biomoe/core/context.h"
#include "biomoe/core/tensor_view.h"
#include "biomoe/ops/op_list.h"

namespace biomoe {

// Rows that hold `slots` slots of `experts` experts, whatever the routing.
constexpr int64_t row_capacity(int64_t slots, int64_t experts, int64_t row_alignment) {
  return slots == 0 ? 0 : (slots + experts * (row_alignment - 1)) / row_alignment * row_alignment;
}

// A stable counting sort of the slots by expert: expert e has rows_E[e] rows from offsets[e], in order of
// slot, then padding up to offsets[e+1], a multiple of row_alignment. slot_of_row is -1 in padding and after
// offsets[E].
struct DispatchPlanArgs {
  TensorView experts_Tk;     // i32
  TensorView offsets_E1;     // i64 [E + 1], assigned
  TensorView rows_E;         // i32, assigned
  TensorView row_of_slot_N;  // i32, assigned
  TensorView slot_of_row_R;  // i32, assigned
  int64_t row_alignment = 1;
};

// Bytes of ctx.scratch that dispatch_plan takes.
size_t dispatch_plan_scratch_bytes(Device device, int64_t slots, int64_t experts);

// y[r] = x[slot_of_row[r] / k]; with `values`, also y_values[r] = values[slot_of_row[r]]. Rows without a slot
// become zeros.
struct PermuteArgs {
  TensorView x_TD;
  TensorView slot_of_row_R;
  TensorView y_RD;        // assigned
  TensorView values_N;    // optional f32 (the routing weights, [T, k] read as [N])
  TensorView y_values_R;  // assigned with values
  int64_t top_k = 1;
};

// x[t] = (accumulate ? x[t] : 0) + sum over j, in order, of y[row_of_slot[t*k + j]];
// with `y_values`, also values[s] = y_values[row_of_slot[s]].
struct UnpermuteArgs {
  TensorView y_RD;
  TensorView row_of_slot_N;
  TensorView x_TD;
  TensorView y_values_R;  // optional f32
  TensorView values_N;    // assigned with y_values
  int64_t top_k = 1;
  bool accumulate = false;
};

}  // namespace biomoe
