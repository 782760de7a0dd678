#include "biomoe/ops/peer_dispatch.h"

#include "biomoe/ops/check_args.h"
#include "biomoe/ops/dispatch_device.h"

namespace biomoe {
namespace {

// What both directions share. `rows` and `values` are one view a rank.
void check_rows(const char* op, Device device, const TensorView& x_TD, const TensorView& experts_Tk,
                const TensorView& row_of_slot_N, std::span<const TensorView> rows, int64_t held_experts) {
  check_rank(op, "x", x_TD, 2);
  check_rank(op, "experts", experts_Tk, 2);
  check_compute_type(op, "x", x_TD, device);
  check_tensor(op, "x", x_TD, x_TD.dtype, x_TD.shape, Layout::kRows);
  check_tensor(op, "experts", experts_Tk, DType::kI32, Shape{x_TD.shape[0], experts_Tk.shape[1]});
  check_tensor(op, "row_of_slot", row_of_slot_N, DType::kI32, Shape{experts_Tk.num_elements()});
  const auto ranks = static_cast<int64_t>(rows.size());
  BM_CHECK(ranks >= 1 && ranks <= kMostPeers, "{}: {} ranks, expected 1 to {}", op, ranks, kMostPeers);
  BM_CHECK(held_experts >= 1, "{}: {} experts a rank", op, held_experts);
  for (const TensorView& view : rows) {
    check_rank(op, "y", view, 2);
    check_tensor(op, "y", view, x_TD.dtype, Shape{view.shape[0], x_TD.shape[1]}, Layout::kRows);
  }
}

void check_values(const char* op, const TensorView& slots_N, int64_t slots,
                  std::span<const TensorView> values, std::span<const TensorView> rows) {
  if (!slots_N && values.empty()) return;
  check_tensor(op, "values", slots_N, DType::kF32, Shape{slots});
  BM_CHECK(values.size() == rows.size(), "{}: values of {} ranks, rows of {}", op, values.size(),
           rows.size());
  for (size_t p = 0; p < values.size(); ++p)
    check_tensor(op, "values", values[p], DType::kF32, Shape{rows[p].shape[0]});
}

}  // namespace

void peer_plan(Context& ctx, const PeerPlanArgs& args) {
  constexpr const char* kOp = "peer_plan";
  check_rank(kOp, "counts", args.counts_PE, 2);
  const int64_t ranks = args.counts_PE.shape[0], experts = args.counts_PE.shape[1];
  BM_CHECK(ranks >= 1 && ranks <= kMostPeers && experts % ranks == 0 && experts > 0,
           "{}: {} experts on {} ranks", kOp, experts, ranks);
  BM_CHECK(args.rank >= 0 && args.rank < ranks, "{}: rank {} of {}", kOp, args.rank, ranks);
  BM_CHECK(args.row_alignment >= 1, "{}: row_alignment is {}", kOp, args.row_alignment);
  check_tensor(kOp, "counts", args.counts_PE, DType::kI32, args.counts_PE.shape);
  check_rank(kOp, "experts", args.experts_Tk, 2);
  check_tensor(kOp, "experts", args.experts_Tk, DType::kI32, args.experts_Tk.shape);
  check_tensor(kOp, "begins", args.begins_E1, DType::kI64, Shape{experts + 1});
  check_tensor(kOp, "row_of_slot", args.row_of_slot_N, DType::kI32, Shape{args.experts_Tk.num_elements()});
  check_tensor(kOp, "offsets", args.offsets_E1, DType::kI64, Shape{experts / ranks + 1});
  check_tensor(kOp, "rows", args.rows_E, DType::kI32, Shape{experts / ranks});
  BIOMOE_RUN_ON_DEVICE(peer_plan, ctx, args);
}

void send_rows(Context& ctx, const SendRowsArgs& args) {
  constexpr const char* kOp = "send_rows";
  check_rows(kOp, ctx.device, args.x_TD, args.experts_Tk, args.row_of_slot_N, args.y_PRD, args.held_experts);
  check_values(kOp, args.values_N, args.experts_Tk.num_elements(), args.y_values_PR, args.y_PRD);
  BIOMOE_RUN_ON_DEVICE(send_rows, ctx, args);
}

void fetch_rows(Context& ctx, const FetchRowsArgs& args) {
  constexpr const char* kOp = "fetch_rows";
  check_rows(kOp, ctx.device, args.x_TD, args.experts_Tk, args.row_of_slot_N, args.y_PRD, args.held_experts);
  check_values(kOp, args.values_N, args.experts_Tk.num_elements(), args.y_values_PR, args.y_PRD);
  BIOMOE_RUN_ON_DEVICE(fetch_rows, ctx, args);
}

void zero_padding(Context& ctx, const ZeroPaddingArgs& args) {
  constexpr const char* kOp = "zero_padding";
  check_rank(kOp, "x", args.x_RD, 2);
  check_compute_type(kOp, "x", args.x_RD, ctx.device);
  check_tensor(kOp, "x", args.x_RD, args.x_RD.dtype, args.x_RD.shape, Layout::kRows);
  check_rank(kOp, "rows", args.rows_E, 1);
  check_tensor(kOp, "rows", args.rows_E, DType::kI32, args.rows_E.shape);
  check_tensor(kOp, "offsets", args.offsets_E1, DType::kI64, Shape{args.rows_E.shape[0] + 1});
  if (args.values_R) check_tensor(kOp, "values", args.values_R, DType::kF32, Shape{args.x_RD.shape[0]});
  BIOMOE_RUN_ON_DEVICE(zero_padding, ctx, args);
}

}  // namespace biomoe
