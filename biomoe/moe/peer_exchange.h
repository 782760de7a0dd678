// PeerExchange: the buffers through which the ranks of a host that split the experts hand rows to each other
// directly (ops/peer_dispatch.h), and the meetings between a hand-over and its use.
//
// Others write into the buffers of sent rows between a fetch of this rank and its next meeting, and read the
// buffers of results between a meeting and the next send: so each of the two has memory of its own, and one
// meeting after the sends and one before the fetches are enough.
#pragma once

#include <memory>
#include <vector>

#include "biomoe/core/arena.h"
#include "biomoe/dist/gpus.h"
#include "biomoe/moe/moe_layer.h"

namespace biomoe {

class PeerExchange {
 public:
  // Of one rank.
  struct Buffers {
    TensorView x_RD, dy_RD;  // sent to the experts: rows and, in backward, gradients
    TensorView weights_R;    // f32, sent with rows: routing weights
    TensorView results_RD;   // fetched from the experts: output, or gradients of x
    TensorView dweights_R;   // f32, fetched in backward
    TensorView counts_PE;    // i32: rows that each rank sends to each expert, and
    TensorView meeting_1;    // f32, of no meaning: this rank's alone
  };

  // Bytes on the device of one rank. `shape` has a split.
  static size_t planned_bytes(const MoeShape& shape);

  // All ranks of shape.split.comm make theirs together. Throws user_error where they cannot share memory.
  PeerExchange(Context& ctx, const MoeShape& shape);

  const Buffers& own() const { return own_; }
  int64_t rank() const;
  // One view a rank.
  const std::vector<TensorView>& x_PRD() const { return x_; }
  const std::vector<TensorView>& dy_PRD() const { return dy_; }
  const std::vector<TensorView>& weights_PR() const { return weights_; }
  const std::vector<TensorView>& results_PRD() const { return results_; }
  const std::vector<TensorView>& dweights_PR() const { return dweights_; }

  // Every rank's counts_PE row, from `rows_E` of this one.
  void gather_counts(Context& ctx, const TensorView& rows_E) const;
  // What the ranks did before it has happened for what comes after it, on all of them.
  void meet(Context& ctx, const char* what) const;

 private:
  static Buffers lay_out(TensorAllocator& allocator, const MoeShape& shape);

  Comm& comm_;
  Arena arena_;
  Buffers own_;
  std::unique_ptr<PeerMemory> memory_;  // ends before the arena
  std::vector<TensorView> x_, dy_, weights_, results_, dweights_;
};

}  // namespace biomoe
