#include "biomoe/ops/dispatch.h"

#include <limits>

#include "biomoe/ops/check_args.h"
#include "biomoe/ops/dispatch_device.h"

namespace biomoe {
namespace {

// Shapes common to both directions: `rows_ND` holds top_k rows for each row of `tokens_TD`.
void check_rows(const char* op, const TensorView& tokens_TD, const TensorView& rows_ND,
                const TensorView& index_N, int64_t top_k) {
  check_rank(op, "x", tokens_TD, 2);
  BM_CHECK(top_k >= 1, "{}: top_k is {}, expected 1 or more", op, top_k);
  const int64_t tokens = tokens_TD.shape[0];
  BM_CHECK(tokens <= std::numeric_limits<int32_t>::max() / top_k,
           "{}: {} tokens of {} slots do not fit in 32-bit slot numbers", op, tokens, top_k);
  const int64_t slots = tokens * top_k;
  check_tensor(op, "x", tokens_TD, DType::kF32, tokens_TD.shape, Layout::kRows);
  check_tensor(op, "y", rows_ND, DType::kF32, Shape{slots, tokens_TD.shape[1]}, Layout::kRows);
  check_tensor(op, "the slot index", index_N, DType::kI32, Shape{slots});
}

// Both absent, or both one value a slot; [T, k] and [N] name the same elements.
void check_values(const char* op, const TensorView& from, const TensorView& to, int64_t slots) {
  if (!from) return;
  for (const TensorView* view : {&from, &to}) {
    if (view->num_elements() != slots) {
      throw failure("{}: values of shape {}, expected {} elements", op, view->shape.str(), slots);
    }
    check_tensor(op, "values", *view, DType::kF32, view->shape);
  }
}

}  // namespace

void dispatch_plan(Context& ctx, const DispatchPlanArgs& args) {
  constexpr const char* kOp = "dispatch_plan";
  check_rank(kOp, "experts", args.experts_Tk, 2);
  check_rank(kOp, "offsets", args.offsets_E1, 1);
  BM_CHECK(args.offsets_E1.shape[0] >= 1, "{}: offsets is empty, expected one more element than experts",
           kOp);
  const int64_t slots = args.experts_Tk.num_elements();
  BM_CHECK(slots <= std::numeric_limits<int32_t>::max(), "{}: {} slots do not fit in 32-bit slot numbers",
           kOp, slots);
  check_tensor(kOp, "experts", args.experts_Tk, DType::kI32, args.experts_Tk.shape);
  check_tensor(kOp, "offsets", args.offsets_E1, DType::kI64, args.offsets_E1.shape);
  check_tensor(kOp, "row_of_slot", args.row_of_slot_N, DType::kI32, Shape{slots});
  check_tensor(kOp, "slot_of_row", args.slot_of_row_N, DType::kI32, Shape{slots});
  BIOMOE_RUN_ON_DEVICE(dispatch_plan, ctx, args);
}

void permute(Context& ctx, const PermuteArgs& args) {
  check_rows("permute", args.x_TD, args.y_ND, args.slot_of_row_N, args.top_k);
  check_values("permute", args.values_N, args.y_values_N, args.slot_of_row_N.shape[0]);
  BIOMOE_RUN_ON_DEVICE(permute, ctx, args);
}

void unpermute(Context& ctx, const UnpermuteArgs& args) {
  check_rows("unpermute", args.x_TD, args.y_ND, args.row_of_slot_N, args.top_k);
  check_values("unpermute", args.y_values_N, args.values_N, args.row_of_slot_N.shape[0]);
  BIOMOE_RUN_ON_DEVICE(unpermute, ctx, args);
}

}  // namespace biomoe
