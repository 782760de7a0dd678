#include "biomoe/ops/dispatch.h"

#include <limits>

#include "biomoe/ops/check_args.h"
#include "biomoe/ops/cuda_sizes.h"
#include "biomoe/ops/dispatch_device.h"

namespace biomoe {
namespace {

// Shapes common to both directions.
void check_rows(const char* op, Device device, const TensorView& tokens_TD, const TensorView& rows_RD,
                int64_t top_k) {
  check_rank(op, "x", tokens_TD, 2);
  BM_CHECK(top_k >= 1, "{}: top_k is {}, expected 1 or more", op, top_k);
  const int64_t tokens = tokens_TD.shape[0];
  BM_CHECK(tokens <= std::numeric_limits<int32_t>::max() / top_k,
           "{}: {} tokens of {} slots do not fit in 32-bit slot numbers", op, tokens, top_k);
  check_rank(op, "y", rows_RD, 2);
  check_compute_type(op, "x", tokens_TD, device);
  check_tensor(op, "x", tokens_TD, tokens_TD.dtype, tokens_TD.shape, Layout::kRows);
  check_tensor(op, "y", rows_RD, tokens_TD.dtype, Shape{rows_RD.shape[0], tokens_TD.shape[1]}, Layout::kRows);
  BM_CHECK(rows_RD.shape[0] >= tokens * top_k, "{}: {} rows for {} tokens of {} slots", op, rows_RD.shape[0],
           tokens, top_k);
}

// Both absent, or both there; [T, k] and [N] name the same elements.
void check_values(const char* op, const TensorView& slots_N, int64_t slots, const TensorView& rows_R,
                  int64_t rows) {
  if (!slots_N && !rows_R) return;
  BM_CHECK(slots_N.num_elements() == slots && rows_R.num_elements() == rows,
           "{}: values of shapes {} and {}, expected {} and {} elements", op, slots_N.shape.str(),
           rows_R.shape.str(), slots, rows);
  check_tensor(op, "values", slots_N, DType::kF32, slots_N.shape);
  check_tensor(op, "values", rows_R, DType::kF32, rows_R.shape);
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
  check_rank(kOp, "slot_of_row", args.slot_of_row_R, 1);
  BM_CHECK(args.row_alignment >= 1, "{}: row_alignment is {}", kOp, args.row_alignment);
  const int64_t experts = args.offsets_E1.shape[0] - 1;
  const int64_t rows = row_capacity(slots, experts, args.row_alignment);
  BM_CHECK(rows <= std::numeric_limits<int32_t>::max(), "{}: {} rows do not fit in 32-bit row numbers", kOp,
           rows);
  check_tensor(kOp, "slot_of_row", args.slot_of_row_R, DType::kI32, Shape{rows});
  check_tensor(kOp, "rows", args.rows_E, DType::kI32, Shape{experts});
  BIOMOE_RUN_ON_DEVICE(dispatch_plan, ctx, args);
}

void permute(Context& ctx, const PermuteArgs& args) {
  check_rows("permute", ctx.device, args.x_TD, args.y_RD, args.top_k);
  const int64_t rows = args.y_RD.shape[0];
  check_tensor("permute", "slot_of_row", args.slot_of_row_R, DType::kI32, Shape{rows});
  check_values("permute", args.values_N, args.x_TD.shape[0] * args.top_k, args.y_values_R, rows);
  BIOMOE_RUN_ON_DEVICE(permute, ctx, args);
}

void unpermute(Context& ctx, const UnpermuteArgs& args) {
  check_rows("unpermute", ctx.device, args.x_TD, args.y_RD, args.top_k);
  const int64_t slots = args.x_TD.shape[0] * args.top_k;
  check_tensor("unpermute", "row_of_slot", args.row_of_slot_N, DType::kI32, Shape{slots});
  check_values("unpermute", args.values_N, slots, args.y_values_R, args.y_RD.shape[0]);
  BIOMOE_RUN_ON_DEVICE(unpermute, ctx, args);
}

size_t dispatch_plan_scratch_bytes(Device device, int64_t slots, int64_t experts) {
  return device == Device::kCpu ? 0 : cuda::counting_sort_scratch_bytes(slots, experts);
}

}  // namespace biomoe
