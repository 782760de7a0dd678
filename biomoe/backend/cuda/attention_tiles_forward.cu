#include "biomoe/backend/cuda/attention_tiles.cuh"

namespace biomoe::cuda {
namespace {

using namespace tiles;

struct ForwardKernelArgs {
  TileForwardArgs args;
  float scale;
};

template <int W>
struct ForwardMemory {
  alignas(128) bf16 q[kResident * kTileStride<W>];
  alignas(128) bf16 k[kPassing * kTileStride<W>];
  alignas(128) bf16 v[kPassing * kTileStride<W>];
  alignas(128) float scores[kResident * kScoreStride];
  alignas(128) bf16 probs[kResident * kProbStride];
};

// The maximum of some scores, and the sum of their exponentials relative to it.
struct Extent {
  float largest = -INFINITY;
  float sum = 0.0f;
  __device__ __forceinline__ void add(float score) {
    if (score > largest) {
      sum = sum * __expf(largest - score) + 1.0f;
      largest = score;
    } else {
      sum += __expf(score - largest);
    }
  }
  __device__ __forceinline__ float log_sum(const Extent& other) const {
    const float most = fmaxf(largest, other.largest);
    return most + logf(sum * __expf(largest - most) + other.sum * __expf(other.largest - most));
  }
};

// A block takes 64 queries of one head, twice over all that they see: for the log sum exps, then for the
// output. Two lanes share a query: each has every other half of a passing tile.
template <int W>
__global__ __launch_bounds__(kThreads) void attention_tiles_forward_kernel(
    const __grid_constant__ ForwardKernelArgs kernel_args) {
  extern __shared__ __align__(128) unsigned char memory[];
  auto& tile = *reinterpret_cast<ForwardMemory<W>*>(memory);
  const TileForwardArgs& a = kernel_args.args;
  const TileShape& shape = a.shape;
  const int depth = static_cast<int>(shape.head_dim), queries = static_cast<int>(shape.queries);
  const int keys = static_cast<int>(shape.keys), behind = keys - queries;
  const int head = static_cast<int>(blockIdx.y);
  const int key_head = head / static_cast<int>(shape.heads / shape.key_value_heads);
  const int first_row = static_cast<int>(blockIdx.x) * kResident;
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int row = warp * kFragment + lane / 2, half = lane % 2 * kFragment;
  const bool live = first_row + row < queries;
  const int token = behind + min(first_row + row, queries - 1), oldest = first_key(shape, token);
  const int begin = first_key(shape, behind + first_row);
  const int end = behind + min(first_row + kResident, queries);
  load_tile<W, kResident>(tile.q, elements(a.q) + int64_t{head} * depth, a.q.stride, first_row, queries,
                          depth);
  const bf16* left = tile.q + warp * kFragment * kTileStride<W>;
  float* scores = tile.scores + warp * kFragment * kScoreStride;
  bf16* probs = tile.probs + warp * kFragment * kProbStride;
  const float* mine = tile.scores + row * kScoreStride + half;

  Extent extent;
  for (int at = begin; at < end; at += kPassing) {
    __syncthreads();
    load_tile<W, kPassing>(tile.k, elements(a.k) + int64_t{key_head} * depth, a.k.stride, at, end, depth);
    __syncthreads();
    multiply_transposed<W>(left, tile.k, depth, scores);
    __syncwarp();
    for (int c = 0; c < kFragment; ++c) {
      const int key = at + half + c;
      if (key >= oldest && key <= token) extent.add(mine[c] * kernel_args.scale);
    }
  }
  const Extent other{__shfl_xor_sync(0xffffffffu, extent.largest, 1),
                     __shfl_xor_sync(0xffffffffu, extent.sum, 1)};
  const float lse = extent.log_sum(other);
  if (live && half == 0 && a.lse) a.lse[int64_t{first_row + row} * shape.heads + head] = lse;

  RowSums<W> out;
  for (int at = begin; at < end; at += kPassing) {
    __syncthreads();
    load_tile<W, kPassing>(tile.k, elements(a.k) + int64_t{key_head} * depth, a.k.stride, at, end, depth);
    load_tile<W, kPassing>(tile.v, elements(a.v) + int64_t{key_head} * depth, a.v.stride, at, end, depth);
    __syncthreads();
    multiply_transposed<W>(left, tile.k, depth, scores);
    __syncwarp();
    for (int c = 0; c < kFragment; ++c) {
      const int key = at + half + c;
      const bool seen = key >= oldest && key <= token;
      tile.probs[row * kProbStride + half + c] =
          __float2bfloat16_rn(seen ? __expf(mine[c] * kernel_args.scale - lse) : 0.0f);
    }
    __syncwarp();
    out.add(probs, tile.v, depth);
  }
  out.write(scores, a.out, int64_t{head} * depth, first_row + warp * kFragment, queries, depth, 1.0f);
}

template <int W>
cudaError_t launch_forward(cudaStream_t stream, const TileForwardArgs& args) {
  return launch(stream, attention_tiles_forward_kernel<W>, sizeof(ForwardMemory<W>), args.shape.queries,
                args.shape.heads, ForwardKernelArgs{args, score_scale(args.shape)});
}

}  // namespace

cudaError_t attention_tiles_forward(cudaStream_t stream, const TileForwardArgs& args) {
  if (args.shape.head_dim <= 64) return launch_forward<64>(stream, args);
  if (args.shape.head_dim <= 128) return launch_forward<128>(stream, args);
  return launch_forward<static_cast<int>(kTileForwardWidth)>(stream, args);
}

}  // namespace biomoe::cuda
