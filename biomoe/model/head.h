// Output head: logits and cross-entropy in chunks of rows, so that the logits of all tokens are never held at
// once.
#pragma once

#include "biomoe/core/arena.h"
#include "biomoe/core/context.h"
#include "biomoe/data/batch.h"

namespace biomoe {

// Rows of logits held at a time: about 8 MiB of them on the CPU, 256 MiB on a GPU, which wants large
// products.
int64_t head_chunk_rows(Device device, int64_t vocab_size);

struct HeadWorkspace {
  TensorView logits_CV;  // one chunk
  TensorView nll_T;      // of every token; 0 where the target is ignored
};
HeadWorkspace allocate_head_workspace(TensorAllocator& allocator, Device device, DType type,
                                      int64_t vocab_size, int64_t tokens);

struct HeadArgs {
  TensorView x_TD;  // final normalised hidden states
  TensorView weight_VD;
  TensorView targets_T;     // i32
  TensorView weights_T;     // f32 loss weights
  TensorView grad_scale_1;  // f64: 1 / (sum of loss weights of the global batch)
  TensorView dx_TD;         // assigned; absent: no gradients are computed
  TensorView dweight_VD;    // assigned, or added to, with dx
  bool accumulate = false;
};

// Fills workspace.nll_T, and the gradients when asked for.
void head_loss(Context& ctx, const HeadArgs& args, const HeadWorkspace& workspace);

// logits_TV = x weight^T (assigned), for callers that want them.
void head_logits(Context& ctx, TensorView x_TD, TensorView weight_VD, TensorView logits_TV);

}  // namespace biomoe
