#include "biomoe/moe/dispatcher.h"

#include "biomoe/moe/peer_exchange.h"
#include "biomoe/ops/comm_clock.h"
#include "biomoe/ops/device.h"
#include "biomoe/ops/dispatch.h"
#include "biomoe/ops/peer_dispatch.h"

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

// What the host reads and writes while messages are planned.
TensorAllocator& host_allocator(TensorAllocator& allocator, const MoeShape& shape) {
  return shape.split.host ? *shape.split.host : allocator;
}

}  // namespace

void allocate_dispatch_saved(TensorAllocator& allocator, const MoeShape& shape, int64_t tokens,
                             MoeSaved& saved) {
  const int64_t slots = tokens * shape.top_k, held = shape.held_experts();
  const bool split = shape.split.ranks > 1, messages = split && !shape.split.shared_memory;
  saved.offsets_E1 = allocator.tensor(DType::kI64, {held + 1});
  saved.rows_E = allocator.tensor(DType::kI32, {held});
  saved.row_of_slot_N = allocator.tensor(DType::kI32, {slots});
  if (!split) saved.slot_of_row_R = allocator.tensor(DType::kI32, {shape.rows(tokens)});
  if (!messages) return;
  saved.slot_of_row_R = allocator.tensor(DType::kI32, {slots});
  TensorAllocator& host = host_allocator(allocator, shape);
  saved.messages.send_E3 = host.tensor(DType::kI64, {shape.experts, kSegmentFields});
  saved.messages.receive_E3 = host.tensor(DType::kI64, {shape.experts, kSegmentFields});
  saved.messages.sent_E = host.tensor(DType::kI32, {shape.experts});
  saved.messages.offsets_E1 = host.tensor(DType::kI64, {held + 1});
  saved.messages.rows_E = host.tensor(DType::kI32, {held});
}

void allocate_dispatch_workspace(TensorAllocator& allocator, const MoeShape& shape, int64_t tokens,
                                 MoeWorkspace& workspace) {
  if (shape.split.ranks == 1) return;
  const int64_t slots = tokens * shape.top_k;
  DispatchWorkspace& work = workspace.dispatch;
  work.offsets_E1 = allocator.tensor(DType::kI64, {shape.experts + 1});
  work.rows_E = allocator.tensor(DType::kI32, {shape.experts});
  if (shape.split.shared_memory) {
    work.slot_of_row_N = allocator.tensor(DType::kI32, {slots});
    return;
  }
  work.rows_ND = allocator.tensor(shape.type, {slots, shape.width});
  work.values_N = allocator.tensor(DType::kF32, {slots});
  TensorAllocator& host = host_allocator(allocator, shape);
  work.counts_2E = host.tensor(DType::kI64, {2, shape.experts});
  work.by_rank_P3 = host.tensor(DType::kI64, {shape.split.ranks, kSegmentFields});
}

void Dispatcher::plan() {
  const TensorView offsets_E1 = split() ? work_.offsets_E1 : saved_.offsets_E1;
  dispatch_plan(ctx_, {.experts_Tk = saved_.experts_Tk,
                       .offsets_E1 = offsets_E1,
                       .rows_E = split() ? work_.rows_E : saved_.rows_E,
                       .row_of_slot_N = saved_.row_of_slot_N,
                       .slot_of_row_R = peers() ? work_.slot_of_row_N : saved_.slot_of_row_R,
                       .row_alignment = split() ? 1 : shape_.row_alignment});
  if (peers()) {
    plan_peers();
  } else if (split()) {
    plan_messages();
  }
}

void Dispatcher::plan_peers() {
  const CommSpan span(ctx_);
  const PeerExchange& peers = *shape_.split.peers;
  peers.gather_counts(ctx_, work_.rows_E);
  peer_plan(ctx_, {.experts_Tk = saved_.experts_Tk,
                   .begins_E1 = work_.offsets_E1,
                   .counts_PE = peers.own().counts_PE,
                   .rank = peers.rank(),
                   .row_alignment = shape_.row_alignment,
                   .row_of_slot_N = saved_.row_of_slot_N,
                   .offsets_E1 = saved_.offsets_E1,
                   .rows_E = saved_.rows_E});
}

// The hosts tell each other how many rows there are for each expert, and wait for their devices to know it.
void Dispatcher::plan_messages() {
  BM_CHECK(shape_.split.comm, "experts are split over ranks that are not there");
  const MessageTables& tables = saved_.messages;
  const int64_t ranks = shape_.split.ranks, held = shape_.held_experts();
  copy_to_host(ctx_, tables.sent_E.data, work_.rows_E.data, tables.sent_E.bytes());
  device_wait_sync(ctx_);
  int64_t* sent = work_.counts_2E.i64();
  int64_t* received = sent + shape_.experts;  // [ranks, held]
  int64_t row = 0;
  for (int64_t e = 0; e < shape_.experts; ++e) {
    sent[e] = tables.sent_E.i32()[e];
    segments_of(tables.send_E3)[e] = {.peer = e / held, .begin = row, .count = sent[e]};
    row += sent[e];
  }
  for (int64_t rank = 0; rank < ranks; ++rank)
    segments_of(work_.by_rank_P3)[rank] = {.peer = rank, .begin = rank, .count = 1};
  const auto by_rank = span_of(work_.by_rank_P3);
  Context host;
  shape_.split.comm->all_to_all_v(host,
                                  {.send = TensorView(sent, DType::kI64, Shape{ranks, held}),
                                   .receive = TensorView(received, DType::kI64, Shape{ranks, held}),
                                   .send_segments = by_rank,
                                   .receive_segments = by_rank},
                                  "the counts of rows for the experts");
  row = 0;
  for (int64_t e = 0; e < held; ++e) {
    const int64_t begin = row;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const int64_t count = received[rank * held + e];
      segments_of(tables.receive_E3)[rank * held + e] = {.peer = rank, .begin = row, .count = count};
      row += count;
    }
    tables.offsets_E1.i64()[e] = begin;
    tables.rows_E.i32()[e] = static_cast<int32_t>(row - begin);
    row = begin + (row - begin + shape_.row_alignment - 1) / shape_.row_alignment * shape_.row_alignment;
  }
  tables.offsets_E1.i64()[held] = row;
  BM_CHECK(row <= shape_.rows(0), "{} rows for this rank's experts, memory is planned for {}", row,
           shape_.rows(0));
  copy_to_device(ctx_, saved_.offsets_E1.data, tables.offsets_E1.data, tables.offsets_E1.bytes());
  copy_to_device(ctx_, saved_.rows_E.data, tables.rows_E.data, tables.rows_E.bytes());
}

// Rows between ranks along the plan, or against it.
void Dispatcher::send(TensorView from, TensorView to, bool forward, const char* what) {
  const CommSpan span(ctx_);
  const MessageTables& plan = saved_.messages;
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
  zero_padding(
      ctx_,
      {.x_RD = rows_RD, .values_R = values_R, .offsets_E1 = saved_.offsets_E1, .rows_E = saved_.rows_E});
}

void Dispatcher::rows_to_experts(TensorView x_TD, TensorView rows_RD, TensorView weights_R) {
  if (!peers()) return to_experts(x_TD, rows_RD, saved_.weights_Tk, weights_R);
  const CommSpan span(ctx_);
  const PeerExchange& peers = *shape_.split.peers;
  send_rows(ctx_, {.x_TD = x_TD,
                   .experts_Tk = saved_.experts_Tk,
                   .row_of_slot_N = saved_.row_of_slot_N,
                   .y_PRD = peers.x_PRD(),
                   .values_N = flat(saved_.weights_Tk),
                   .y_values_PR = peers.weights_PR(),
                   .held_experts = shape_.held_experts()});
  peers.meet(ctx_, "rows to the experts");
  zero_padding(ctx_, {.x_RD = rows_RD,
                      .values_R = peers.own().weights_R,
                      .offsets_E1 = saved_.offsets_E1,
                      .rows_E = saved_.rows_E});
  copy_on_device(ctx_, weights_R.data, peers.own().weights_R.data, weights_R.bytes());
}

void Dispatcher::gradients_to_experts(TensorView x_TD, TensorView rows_RD, TensorView dy_TD,
                                      TensorView dy_RD) {
  if (!peers()) {
    to_experts(x_TD, rows_RD);
    return to_experts(dy_TD, dy_RD);
  }
  const CommSpan span(ctx_);
  const PeerExchange& peers = *shape_.split.peers;
  SendRowsArgs args{.x_TD = x_TD,
                    .experts_Tk = saved_.experts_Tk,
                    .row_of_slot_N = saved_.row_of_slot_N,
                    .y_PRD = peers.x_PRD(),
                    .held_experts = shape_.held_experts()};
  send_rows(ctx_, args);
  args.x_TD = dy_TD;
  args.y_PRD = peers.dy_PRD();
  send_rows(ctx_, args);
  peers.meet(ctx_, "gradients to the experts");
  for (const TensorView& rows : {rows_RD, dy_RD})
    zero_padding(ctx_, {.x_RD = rows, .offsets_E1 = saved_.offsets_E1, .rows_E = saved_.rows_E});
}

void Dispatcher::to_tokens(TensorView rows_RD, TensorView x_TD, TensorView values_R, TensorView values_Tk) {
  if (peers()) {
    const CommSpan span(ctx_);
    const PeerExchange& peers = *shape_.split.peers;
    peers.meet(ctx_, "rows from the experts");
    fetch_rows(ctx_, {.y_PRD = peers.results_PRD(),
                      .experts_Tk = saved_.experts_Tk,
                      .row_of_slot_N = saved_.row_of_slot_N,
                      .x_TD = x_TD,
                      .y_values_PR = values_R ? std::span<const TensorView>(peers.dweights_PR())
                                              : std::span<const TensorView>(),
                      .values_N = flat(values_Tk),
                      .held_experts = shape_.held_experts()});
    return;
  }
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
