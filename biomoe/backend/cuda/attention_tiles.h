// Attention in tiles, on the tensor cores that every GPU from compute capability 8.0 has: what decoding runs
// on, and whole passes where cuDNN has none for packed sequences. A tile of 64 rows stays in shared memory
// while tiles of 32 of the other side pass by; probabilities are made again from the log sum exps, so that
// what is added up never needs scaling, and every sum has a fixed order. Tiles are cut without regard to
// sequences: what a query must not see is multiplied by 0.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "biomoe/ops/cuda_sizes.h"

namespace biomoe::cuda {

// A matrix of bf16: one token a row, heads side by side.
struct TileRows {
  uint16_t* data = nullptr;
  int64_t stride = 0;  // elements
};

// Widths of heads: multiples of 16, up to these.
inline constexpr int64_t kTileForwardWidth = kWidestHead;
inline constexpr int64_t kTileBackwardWidth = kWidestTrainedElsewhere;

struct TileShape {
  const int32_t* cu_seqlens = nullptr;  // [sequences + 1]; null: all keys are one sequence
  int64_t sequences = 1;
  int64_t queries = 0;  // rows of q
  int64_t keys = 0;     // rows of k and v; the queries are the last tokens of them
  int64_t heads = 0;
  int64_t key_value_heads = 0;
  int64_t head_dim = 0;
  int64_t window = 0;  // 0: none
};

struct TileForwardArgs {
  TileShape shape;
  TileRows q, k, v;
  TileRows out;          // assigned
  float* lse = nullptr;  // [queries, heads], assigned; may be null
};

// As AttentionBackwardArgs (ops/attention.h), with as many queries as keys.
struct TileBackwardArgs {
  TileShape shape;
  TileRows q, k, v, out, dout;
  const float* lse = nullptr;    // of forward
  float* output_dots = nullptr;  // [queries, heads], workspace
  TileRows dq, dk, dv;           // assigned
};

// Both return what the launches returned.
cudaError_t attention_tiles_forward(cudaStream_t stream, const TileForwardArgs& args);
cudaError_t attention_tiles_backward(cudaStream_t stream, const TileBackwardArgs& args);

}  // namespace biomoe::cuda
