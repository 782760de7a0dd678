#include "biomoe/moe/peer_exchange.h"

#include "biomoe/ops/device.h"
#include "biomoe/ops/peer_dispatch.h"

namespace biomoe {

PeerExchange::Buffers PeerExchange::lay_out(TensorAllocator& allocator, const MoeShape& shape) {
  const int64_t rows = shape.rows(shape.split.max_tokens);
  return {.x_RD = allocator.tensor(shape.type, {rows, shape.width}),
          .dy_RD = allocator.tensor(shape.type, {rows, shape.width}),
          .weights_R = allocator.tensor(DType::kF32, {rows}),
          .results_RD = allocator.tensor(shape.type, {rows, shape.width}),
          .dweights_R = allocator.tensor(DType::kF32, {rows}),
          .counts_PE = allocator.tensor(DType::kI32, {shape.split.ranks, shape.experts}),
          .meeting_1 = allocator.tensor(DType::kF32, {1})};
}

size_t PeerExchange::planned_bytes(const MoeShape& shape) {
  return biomoe::planned_bytes([&](TensorAllocator& to) { lay_out(to, shape); });
}

PeerExchange::PeerExchange(Context& ctx, const MoeShape& shape)
    : comm_(*shape.split.comm),
      arena_(planned_bytes(shape), "rows between ranks", device_memory(ctx.device)),
      own_(lay_out(arena_, shape)) {
  BM_CHECK(shape.split.ranks == comm_.size() && comm_.size() <= kMostPeers,
           "{} ranks share memory, at most {}", comm_.size(), kMostPeers);
  memory_ = nccl::share_memory(comm_, arena_.base());
  for (void* base : memory_->bases()) {
    // All ranks lay the same buffers out.
    const auto there = [&](const TensorView& mine) {
      TensorView theirs = mine;
      theirs.data = static_cast<uint8_t*>(base) + (static_cast<uint8_t*>(mine.data) - arena_.base());
      return theirs;
    };
    x_.push_back(there(own_.x_RD));
    dy_.push_back(there(own_.dy_RD));
    weights_.push_back(there(own_.weights_R));
    results_.push_back(there(own_.results_RD));
    dweights_.push_back(there(own_.dweights_R));
  }
}

int64_t PeerExchange::rank() const {
  return comm_.rank();
}

void PeerExchange::gather_counts(Context& ctx, const TensorView& rows_E) const {
  comm_.all_gather(ctx, rows_E, own_.counts_PE, "the counts of rows for the experts");
}

void PeerExchange::meet(Context& ctx, const char* what) const {
  comm_.all_reduce(ctx, own_.meeting_1, ReduceOp::kMax, what);
}

}  // namespace biomoe
