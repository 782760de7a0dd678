#include "biomoe/moe/dispatcher.h"

#include "biomoe/ops/dispatch.h"

namespace biomoe {
namespace {

constexpr int64_t kSegmentFields = 3;
static_assert(sizeof(RowSegment) == kSegmentFields * sizeof(int64_t));

// [T, k] read as [T*k].
TensorView flat(const TensorView& view) {
  return view ? TensorView(view.data, view.dtype, Shape{view.num_elements()}) : TensorView();
}

RowSegment* segments_of(const TensorView& view_S3) {
  return reinterpret_cast<RowSegment*>(view_S3.i64());
}

std::span<const RowSegment> span_of(const TensorView& view_S3) {
  return {segments_of(view_S3), static_cast<size_t>(view_S3.shape[0])};
}

}  // namespace

void allocate_dispatch_saved(TensorAllocator& allocator, const MoeShape& shape, int64_t tokens,
                             MoeSaved& saved) {
  const int64_t slots = tokens * shape.top_k, held = shape.held_experts();
  const bool split = shape.split.ranks > 1;
  saved.offsets_E1 = allocator.tensor(DType::kI64, {held + 1});
  saved.rows_E = allocator.tensor(DType::kI32, {held});
  saved.row_of_slot_N = allocator.tensor(DType::kI32, {slots});
  saved.slot_of_row_R = allocator.tensor(DType::kI32, {split ? slots : shape.rows(tokens)});
  if (!split) return;
  saved.segments.send_E3 = allocator.tensor(DType::kI64, {shape.experts, kSegmentFields});
  saved.segments.receive_E3 = allocator.tensor(DType::kI64, {shape.experts, kSegmentFields});
}

void allocate_dispatch_workspace(TensorAllocator& allocator, const MoeShape& shape, int64_t tokens,
                                 MoeWorkspace& workspace) {
  if (shape.split.ranks == 1) return;
  const int64_t slots = tokens * shape.top_k;
  DispatchWorkspace& work = workspace.dispatch;
  work.rows_ND = allocator.tensor(shape.type, {slots, shape.width});
  work.values_N = allocator.tensor(DType::kF32, {slots});
  work.offsets_E1 = allocator.tensor(DType::kI64, {shape.experts + 1});
  work.rows_E = allocator.tensor(DType::kI32, {shape.experts});
  work.counts_2E = allocator.tensor(DType::kI64, {2, shape.experts});
  work.by_rank_P3 = allocator.tensor(DType::kI64, {shape.split.ranks, kSegmentFields});
}

void Dispatcher::plan() {
  const TensorView offsets_E1 = split() ? work_.offsets_E1 : saved_.offsets_E1;
  dispatch_plan(ctx_, {.experts_Tk = saved_.experts_Tk,
                       .offsets_E1 = offsets_E1,
                       .rows_E = split() ? work_.rows_E : saved_.rows_E,
                       .row_of_slot_N = saved_.row_of_slot_N,
                       .slot_of_row_R = saved_.slot_of_row_R,
                       .row_alignment = split() ? 1 : shape_.row_alignment});
  if (!split()) return;
  BM_CHECK(ctx_.device == Device::kCpu && shape_.row_alignment == 1 && shape_.split.comm,
           "experts are split over ranks of the CPU only");
  const int64_t ranks = shape_.split.ranks, held = shape_.held_experts();
  const int64_t* offsets = offsets_E1.i64();
  int64_t* sent = work_.counts_2E.i64();
  int64_t* received = sent + shape_.experts;  // [ranks, held]
  RowSegment* send = segments_of(saved_.segments.send_E3);
  for (int64_t e = 0; e < shape_.experts; ++e) {
    sent[e] = offsets[e + 1] - offsets[e];
    send[e] = {.peer = e / held, .begin = offsets[e], .count = sent[e]};
  }
  for (int64_t rank = 0; rank < ranks; ++rank)
    segments_of(work_.by_rank_P3)[rank] = {.peer = rank, .begin = rank, .count = 1};
  const auto by_rank = span_of(work_.by_rank_P3);
  shape_.split.comm->all_to_all_v(ctx_,
                                  {.send = TensorView(sent, DType::kI64, Shape{ranks, held}),
                                   .receive = TensorView(received, DType::kI64, Shape{ranks, held}),
                                   .send_segments = by_rank,
                                   .receive_segments = by_rank},
                                  "the counts of rows for the experts");
  int64_t row = 0;
  for (int64_t e = 0; e < held; ++e) {
    saved_.offsets_E1.i64()[e] = row;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const int64_t count = received[rank * held + e];
      segments_of(saved_.segments.receive_E3)[rank * held + e] = {.peer = rank, .begin = row, .count = count};
      row += count;
    }
    saved_.rows_E.i32()[e] = static_cast<int32_t>(row - saved_.offsets_E1.i64()[e]);
  }
  saved_.offsets_E1.i64()[held] = row;
  BM_CHECK(row <= shape_.rows(0), "{} rows for this rank's experts, memory is planned for {}", row,
           shape_.rows(0));
}

// Rows between ranks along the plan, or against it.
void Dispatcher::send(TensorView from, TensorView to, bool forward, const char* what) {
  const DispatchSegments& plan = saved_.segments;
  shape_.split.comm->all_to_all_v(ctx_,
                                  {.send = from,
                                   .receive = to,
                                   .send_segments = span_of(forward ? plan.send_E3 : plan.receive_E3),
                                   .receive_segments = span_of(forward ? plan.receive_E3 : plan.send_E3)},
                                  what);
}

void Dispatcher::to_experts(TensorView x_TD, TensorView rows_RD, TensorView values_Tk, TensorView values_R) {
  permute(ctx_, {.x_TD = x_TD,
                 .slot_of_row_R = saved_.slot_of_row_R,
                 .y_RD = split() ? work_.rows_ND : rows_RD,
                 .values_N = flat(values_Tk),
                 .y_values_R = split() && values_R ? work_.values_N : values_R,
                 .top_k = shape_.top_k});
  if (!split()) return;
  send(work_.rows_ND, rows_RD, true, "rows to the experts");
  if (values_R) send(work_.values_N, values_R, true, "routing weights to the experts");
}

void Dispatcher::to_tokens(TensorView rows_RD, TensorView x_TD, TensorView values_R, TensorView values_Tk) {
  if (split()) {
    send(rows_RD, work_.rows_ND, false, "rows from the experts");
    if (values_R) send(values_R, work_.values_N, false, "gradients of routing weights from the experts");
  }
  unpermute(ctx_, {.y_RD = split() ? work_.rows_ND : rows_RD,
                   .row_of_slot_N = saved_.row_of_slot_N,
                   .x_TD = x_TD,
                   .y_values_R = split() && values_R ? work_.values_N : values_R,
                   .values_N = flat(values_Tk),
                   .top_k = shape_.top_k});
}

}  // namespace biomoe
