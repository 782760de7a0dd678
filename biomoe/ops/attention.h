// Causal grouped-query attention over packed sequences of different lengths (THD), with an optional sliding
// window.
#pragma once

#include <optional>

#include "biomoe/core/context.h"
#include "biomoe/core/tensor_view.h"
#include "biomoe/ops/op_list.h"

namespace biomoe {

struct AttentionShape {
  int64_t num_heads = 0;            // H
  int64_t num_key_value_heads = 0;  // G, divides H; query head h reads key/value head h / (H / G)
  int64_t head_dim = 0;             // K
  int64_t max_seqlen = 0;           // bound of every sequence, for scratch
  std::optional<int64_t> window;    // token i sees j with i - window < j <= i
};

// out = softmax(q k^T / sqrt(K) + mask) v, never across a sequence boundary.
// q, k, v are column bands of one qkv matrix or separate ones: rows of H*K, G*K, G*K elements.
struct AttentionForwardArgs {
  AttentionShape shape;
  TensorView q_TC;
  TensorView k_TC;
  TensorView v_TC;
  TensorView cu_seqlens_B1;  // i32
  TensorView out_TC;         // [T, H*K], assigned
  TensorView lse_HT;  // f32, H*T elements, assigned: log sum exp of the scaled scores ([H, T] on the CPU;
                      // on the GPU in the order that its backward wants)
};

// Probabilities are recomputed from q, k and lse.
struct AttentionBackwardArgs {
  AttentionShape shape;
  TensorView q_TC;
  TensorView k_TC;
  TensorView v_TC;
  TensorView cu_seqlens_B1;
  TensorView out_TC;
  TensorView lse_HT;
  TensorView dout_TC;
  TensorView dq_TC;  // assigned
  TensorView dk_TC;  // assigned (summed over the query heads of a group)
  TensorView dv_TC;  // assigned
};

// Incremental decoding of one sequence: its last T tokens attend to a cache of the keys and values of all its
// P tokens, their own included. Gives what attention_forward gives those T rows of the whole sequence.
struct AttentionDecodeArgs {
  AttentionShape shape;
  TensorView q_TC;  // of tokens [P - T, P)
  TensorView k_PC;  // of tokens [0, P)
  TensorView v_PC;
  TensorView out_TC;  // [T, H*K], assigned
};

// Bytes of ctx.scratch for either direction with this many tokens, CPU threads and ctx.deterministic, and for
// decoding on the CPU (on the GPU that takes none).
size_t attention_scratch_bytes(Device device, const AttentionShape& shape, int64_t tokens, int num_threads,
                               bool deterministic = false);

// The same as each backend defines it. The GPU's is host arithmetic and part of every build.
namespace cpu {
size_t attention_scratch_bytes(const AttentionShape& shape, int64_t tokens, int num_threads);
}
namespace cuda {
size_t attention_scratch_bytes(const AttentionShape& shape, int64_t tokens, bool deterministic);
}

}  // namespace biomoe
