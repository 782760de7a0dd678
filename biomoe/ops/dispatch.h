// From routing decisions to expert-ordered rows and back. N = T*k slots; slot (t, j) has number t*k + j.
#pragma once

#include "biomoe/core/tensor_view.h"
#include "biomoe/ops/op_list.h"

namespace biomoe {

// A stable counting sort of the slots by expert: rows of expert e are [offsets[e], offsets[e+1]), in order of
// slot.
struct DispatchPlanArgs {
  TensorView experts_Tk;     // i32
  TensorView offsets_E1;     // i64 [E + 1], assigned
  TensorView row_of_slot_N;  // i32, assigned
  TensorView slot_of_row_N;  // i32, assigned
};

// y[r] = x[slot_of_row[r] / k]; with `values`, also y_values[r] = values[slot_of_row[r]].
struct PermuteArgs {
  TensorView x_TD;
  TensorView slot_of_row_N;
  TensorView y_ND;        // assigned
  TensorView values_N;    // optional f32 (the routing weights, [T, k] read as [N])
  TensorView y_values_N;  // assigned with values
  int64_t top_k = 1;
};

// x[t] = (accumulate ? x[t] : 0) + sum over j, in order, of y[row_of_slot[t*k + j]];
// with `y_values`, also values[s] = y_values[row_of_slot[s]].
struct UnpermuteArgs {
  TensorView y_ND;
  TensorView row_of_slot_N;
  TensorView x_TD;
  TensorView y_values_N;  // optional f32
  TensorView values_N;    // assigned with y_values
  int64_t top_k = 1;
  bool accumulate = false;
};

}  // namespace biomoe
