#include "biomoe/backend/cuda/attention_tiles.cuh"

namespace biomoe::cuda {
namespace {

using namespace tiles;

struct BackwardKernelArgs {
  TileBackwardArgs args;
  float scale;
};

// first: q or k, second: dout or v.
template <int W>
struct BackwardMemory {
  alignas(128) bf16 resident_first[kResident * kTileStride<W>];
  alignas(128) bf16 resident_second[kResident * kTileStride<W>];
  alignas(128) bf16 passing_first[kPassing * kTileStride<W>];
  alignas(128) bf16 passing_second[kPassing * kTileStride<W>];
  alignas(128) float scores[kResident * kScoreStride];
  alignas(128) float dprobs[kResident * kScoreStride];
  alignas(128) bf16 probs[kResident * kProbStride];
  alignas(128) bf16 dscores[kResident * kProbStride];
};

// What a query has besides its rows.
struct Query {
  int token;
  int oldest;  // the first key that it sees
  float lse;
  float output_dot;
};
__device__ __forceinline__ Query query_at(const TileBackwardArgs& a, int token, int head) {
  const int64_t at = int64_t{token} * a.shape.heads + head;
  return {token, first_key(a.shape, token), a.lse[at], a.output_dots[at]};
}

struct Gradient {
  float prob, dscore;
};
__device__ __forceinline__ Gradient gradient_of(const Query& query, int key, float score, float dprob,
                                                float scale) {
  if (key < query.oldest || key > query.token) return {0.0f, 0.0f};
  const float prob = __expf(score * scale - query.lse);
  return {prob, prob * (dprob - query.output_dot)};
}

// Sum of dout * out for every token and head: one a warp.
__global__ __launch_bounds__(kThreads) void output_dots_kernel(const __grid_constant__ TileBackwardArgs a) {
  const int64_t item = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kWarp;
  if (item >= a.shape.queries * a.shape.heads) return;
  const int64_t token = item / a.shape.heads, column = item % a.shape.heads * a.shape.head_dim;
  float sum = 0.0f;
  for (int64_t i = threadIdx.x % kWarp; i < a.shape.head_dim; i += kWarp) {
    sum += to_float(elements(a.out)[token * a.out.stride + column + i]) *
           to_float(elements(a.dout)[token * a.dout.stride + column + i]);
  }
  sum = warp_sum(sum);
  if (threadIdx.x % kWarp == 0) a.output_dots[item] = sum;
}

// A block takes 64 queries of one head; keys pass by.
template <int W>
__global__ __launch_bounds__(kThreads) void attention_tiles_dq_kernel(
    const __grid_constant__ BackwardKernelArgs kernel_args) {
  extern __shared__ __align__(128) unsigned char memory[];
  auto& tile = *reinterpret_cast<BackwardMemory<W>*>(memory);
  const TileBackwardArgs& a = kernel_args.args;
  const TileShape& shape = a.shape;
  const int depth = static_cast<int>(shape.head_dim), tokens = static_cast<int>(shape.queries);
  const int head = static_cast<int>(blockIdx.y);
  const int64_t column = int64_t{head} * depth;
  const int64_t key_column = head / (shape.heads / shape.key_value_heads) * depth;
  const int first_row = static_cast<int>(blockIdx.x) * kResident;
  const int end = min(first_row + kResident, tokens);
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int row = warp * kFragment + lane / 2, half = lane % 2 * kFragment;
  const Query query = query_at(a, min(first_row + row, tokens - 1), head);
  const int warp_tile = warp * kFragment * kTileStride<W>;
  load_tile<W, kResident>(tile.resident_first, elements(a.q) + column, a.q.stride, first_row, tokens, depth);
  load_tile<W, kResident>(tile.resident_second, elements(a.dout) + column, a.dout.stride, first_row, tokens,
                          depth);
  RowSums<W> dq;
  for (int at = first_key(shape, first_row); at < end; at += kPassing) {
    __syncthreads();
    load_tile<W, kPassing>(tile.passing_first, elements(a.k) + key_column, a.k.stride, at, end, depth);
    load_tile<W, kPassing>(tile.passing_second, elements(a.v) + key_column, a.v.stride, at, end, depth);
    __syncthreads();
    multiply_transposed<W>(tile.resident_first + warp_tile, tile.passing_first, depth,
                           tile.scores + warp * kFragment * kScoreStride);
    multiply_transposed<W>(tile.resident_second + warp_tile, tile.passing_second, depth,
                           tile.dprobs + warp * kFragment * kScoreStride);
    __syncwarp();
    for (int c = half; c < half + kFragment; ++c) {
      const Gradient gradient = gradient_of(query, at + c, tile.scores[row * kScoreStride + c],
                                            tile.dprobs[row * kScoreStride + c], kernel_args.scale);
      tile.dscores[row * kProbStride + c] = __float2bfloat16_rn(gradient.dscore);
    }
    __syncwarp();
    dq.add(tile.dscores + warp * kFragment * kProbStride, tile.passing_first, depth);
  }
  dq.write(tile.scores + warp * kFragment * kScoreStride, a.dq, column, first_row + warp * kFragment, tokens,
           depth, kernel_args.scale);
}

// A block takes 64 keys of one key/value head; the queries of all its heads pass by.
template <int W>
__global__ __launch_bounds__(kThreads) void attention_tiles_dkv_kernel(
    const __grid_constant__ BackwardKernelArgs kernel_args) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ Query queries[kPassing];
  auto& tile = *reinterpret_cast<BackwardMemory<W>*>(memory);
  const TileBackwardArgs& a = kernel_args.args;
  const TileShape& shape = a.shape;
  const int depth = static_cast<int>(shape.head_dim), tokens = static_cast<int>(shape.keys);
  const int group = static_cast<int>(shape.heads / shape.key_value_heads);
  const int64_t key_column = int64_t{blockIdx.y} * depth;
  const int first_row = static_cast<int>(blockIdx.x) * kResident;
  const int end = min(tokens, end_of_queries(shape, min(first_row + kResident, tokens) - 1));
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const int row = warp * kFragment + lane / 2, half = lane % 2 * kFragment, key = first_row + row;
  const int warp_tile = warp * kFragment * kTileStride<W>;
  const int warp_scores = warp * kFragment * kScoreStride, warp_probs = warp * kFragment * kProbStride;
  load_tile<W, kResident>(tile.resident_first, elements(a.k) + key_column, a.k.stride, first_row, tokens,
                          depth);
  load_tile<W, kResident>(tile.resident_second, elements(a.v) + key_column, a.v.stride, first_row, tokens,
                          depth);
  RowSums<W> dk, dv;
  for (int head = static_cast<int>(blockIdx.y) * group; head < (static_cast<int>(blockIdx.y) + 1) * group;
       ++head) {
    const int64_t column = int64_t{head} * depth;
    for (int at = first_row; at < end; at += kPassing) {
      __syncthreads();
      load_tile<W, kPassing>(tile.passing_first, elements(a.q) + column, a.q.stride, at, end, depth);
      load_tile<W, kPassing>(tile.passing_second, elements(a.dout) + column, a.dout.stride, at, end, depth);
      if (threadIdx.x < kPassing) {
        const int token = at + static_cast<int>(threadIdx.x);
        constexpr Query kSeesNoKey{-1, 0, 0.0f, 0.0f};
        queries[threadIdx.x] = token < end ? query_at(a, token, head) : kSeesNoKey;
      }
      __syncthreads();
      multiply_transposed<W>(tile.resident_first + warp_tile, tile.passing_first, depth,
                             tile.scores + warp_scores);
      multiply_transposed<W>(tile.resident_second + warp_tile, tile.passing_second, depth,
                             tile.dprobs + warp_scores);
      __syncwarp();
      for (int c = half; c < half + kFragment; ++c) {
        const Gradient gradient = gradient_of(queries[c], key, tile.scores[row * kScoreStride + c],
                                              tile.dprobs[row * kScoreStride + c], kernel_args.scale);
        tile.probs[row * kProbStride + c] = __float2bfloat16_rn(gradient.prob);
        tile.dscores[row * kProbStride + c] = __float2bfloat16_rn(gradient.dscore);
      }
      __syncwarp();
      dv.add(tile.probs + warp_probs, tile.passing_second, depth);
      dk.add(tile.dscores + warp_probs, tile.passing_first, depth);
    }
  }
  dk.write(tile.scores + warp_scores, a.dk, key_column, first_row + warp * kFragment, tokens, depth,
           kernel_args.scale);
  dv.write(tile.scores + warp_scores, a.dv, key_column, first_row + warp * kFragment, tokens, depth, 1.0f);
}

template <int W>
cudaError_t launch_backward(cudaStream_t stream, const TileBackwardArgs& args) {
  const TileShape& shape = args.shape;
  const BackwardKernelArgs kernel_args{args, score_scale(shape)};
  const int64_t items = shape.queries * shape.heads;
  output_dots_kernel<<<static_cast<unsigned>((items + kWarps - 1) / kWarps), kThreads, 0, stream>>>(args);
  cudaError_t status = cudaGetLastError();
  if (status != cudaSuccess) return status;
  status = launch(stream, attention_tiles_dq_kernel<W>, sizeof(BackwardMemory<W>), shape.queries, shape.heads,
                  kernel_args);
  if (status != cudaSuccess) return status;
  return launch(stream, attention_tiles_dkv_kernel<W>, sizeof(BackwardMemory<W>), shape.keys,
                shape.key_value_heads, kernel_args);
}

}  // namespace

cudaError_t attention_tiles_backward(cudaStream_t stream, const TileBackwardArgs& args) {
  if (args.shape.head_dim <= 64) return launch_backward<64>(stream, args);
  return launch_backward<static_cast<int>(kTileBackwardWidth)>(stream, args);
}

}  // namespace biomoe::cuda
