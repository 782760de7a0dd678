// Dispatcher: tokens' rows to the experts that they are routed to, and back; over ranks where experts are
// split. Needs no host synchronisation where they are not.
#pragma once

#include "biomoe/core/context.h"
#include "biomoe/moe/moe_layer.h"

namespace biomoe {

// Parts of MoeSaved and MoeWorkspace that a dispatcher uses.
void allocate_dispatch_saved(TensorAllocator& allocator, const MoeShape& shape, int64_t tokens,
                             MoeSaved& saved);
void allocate_dispatch_workspace(TensorAllocator& allocator, const MoeShape& shape, int64_t tokens,
                                 MoeWorkspace& workspace);

// Of one layer and batch. Where experts are split, all ranks of the split make the same calls, those without
// a token and those whose experts get no row too.
class Dispatcher {
 public:
  Dispatcher(Context& ctx, const MoeShape& shape, const MoeSaved& saved, const MoeWorkspace& workspace)
      : ctx_(ctx), shape_(shape), saved_(saved), work_(workspace.dispatch) {}

  // From saved.experts_Tk: everything in `saved` that says where rows go. Forward makes it, backward reads
  // it.
  void plan();

  // rows = the tokens' vectors in the order of the experts held here, by rank and slot within one; weights =
  // the routing weights of those slots.
  void rows_to_experts(TensorView x_TD, TensorView rows_RD, TensorView weights_R);

  // The vectors again, and gradients of the tokens' outputs.
  void gradients_to_experts(TensorView x_TD, TensorView rows_RD, TensorView dy_TD, TensorView dy_RD);

  // The reverse: x[t] = sum over its slots of their rows; values of rows -> values of slots.
  void to_tokens(TensorView rows_RD, TensorView x_TD, TensorView values_R = {}, TensorView values_Tk = {});

 private:
  bool split() const { return shape_.split.ranks > 1; }
  bool peers() const { return split() && shape_.split.shared_memory; }
  void plan_messages();
  void plan_peers();
  void to_experts(TensorView x_TD, TensorView rows_RD, TensorView values_Tk = {}, TensorView values_R = {});
  void send(TensorView from, TensorView to, bool forward, const char* what);

  Context& ctx_;
  const MoeShape& shape_;
  const MoeSaved& saved_;
  const DispatchWorkspace& work_;
};

}  // namespace biomoe
