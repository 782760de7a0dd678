// The parts of attention in tiles that both directions share: see attention_tiles.h.
#pragma once

#include <cuda_bf16.h>
#include <mma.h>

#include <cmath>

#include "biomoe/backend/cuda/attention_tiles.h"
#include "biomoe/backend/cuda/device/reduce.cuh"
#include "biomoe/backend/cuda/device/vector.cuh"

namespace biomoe::cuda::tiles {

namespace wmma = nvcuda::wmma;

inline constexpr int kFragment = 16;  // rows, columns and depth of one product of the tensor cores
inline constexpr int kWarps = 4;
inline constexpr int kThreads = kWarps * kWarp;
inline constexpr int kResident = kWarps * kFragment;  // rows of the tile that stays: 16 a warp
inline constexpr int kPassing = 2 * kFragment;        // rows of those that pass by

// Elements between rows, so that rows begin at different banks of shared memory.
template <int W>
inline constexpr int kTileStride = W + 8;
inline constexpr int kScoreStride = kPassing + 4;  // fp32
inline constexpr int kProbStride = kPassing + 8;   // bf16

using Sum = wmma::fragment<wmma::accumulator, kFragment, kFragment, kFragment, float>;
using Left = wmma::fragment<wmma::matrix_a, kFragment, kFragment, kFragment, bf16, wmma::row_major>;

__device__ __forceinline__ const bf16* elements(const TileRows& rows) {
  return reinterpret_cast<const bf16*>(rows.data);
}

// Rows [first, first + kRows) of a head into a tile, zeros from row `end` on. from: the head's first element.
template <int W, int kRows>
__device__ __forceinline__ void load_tile(bf16* tile, const bf16* from, int64_t stride, int first, int end,
                                          int depth) {
  constexpr int V = 8;
  const bool aligned = reinterpret_cast<uintptr_t>(from) % 16 == 0 && stride % V == 0;
  const int parts = depth / V;
  for (int i = static_cast<int>(threadIdx.x); i < kRows * parts; i += kThreads) {
    const int row = i / parts, column = (i - row * parts) * V;
    Pack<bf16, V> pack{};
    if (first + row < end) {
      const bf16* source = from + (first + row) * stride + column;
      if (aligned) {
        pack = load<V>(source);
      } else {
        float values[V];
#pragma unroll
        for (int j = 0; j < V; ++j) values[j] = to_float(source[j]);
        pack.set(values);
      }
    }
    store(tile + row * kTileStride<W> + column, pack);
  }
}

// scores[16][kPassing] = left[16][depth] right[kPassing][depth]^T, by one warp.
template <int W>
__device__ __forceinline__ void multiply_transposed(const bf16* left, const bf16* right, int depth,
                                                    float* scores) {
  Sum sums[kPassing / kFragment];
#pragma unroll
  for (Sum& sum : sums) wmma::fill_fragment(sum, 0.0f);
  for (int k = 0; k < depth; k += kFragment) {
    Left a;
    wmma::load_matrix_sync(a, left + k, kTileStride<W>);
#pragma unroll
    for (int n = 0; n < kPassing / kFragment; ++n) {
      wmma::fragment<wmma::matrix_b, kFragment, kFragment, kFragment, bf16, wmma::col_major> b;
      wmma::load_matrix_sync(b, right + n * kFragment * kTileStride<W> + k, kTileStride<W>);
      wmma::mma_sync(sums[n], a, b, sums[n]);
    }
  }
#pragma unroll
  for (int n = 0; n < kPassing / kFragment; ++n) {
    wmma::store_matrix_sync(scores + n * kFragment, sums[n], kScoreStride, wmma::mem_row_major);
  }
}

// Sums of 16 rows and W columns, by one warp.
template <int W>
struct RowSums {
  Sum sums[W / kFragment];

  __device__ __forceinline__ RowSums() {
#pragma unroll
    for (Sum& sum : sums) wmma::fill_fragment(sum, 0.0f);
  }

  // += factors[16][kPassing] right[kPassing][depth]
  __device__ __forceinline__ void add(const bf16* factors, const bf16* right, int depth) {
#pragma unroll
    for (int k = 0; k < kPassing; k += kFragment) {
      Left a;
      wmma::load_matrix_sync(a, factors + k, kProbStride);
#pragma unroll
      for (int n = 0; n < W / kFragment; ++n) {
        if (n * kFragment >= depth) continue;
        wmma::fragment<wmma::matrix_b, kFragment, kFragment, kFragment, bf16, wmma::row_major> b;
        wmma::load_matrix_sync(b, right + k * kTileStride<W> + n * kFragment, kTileStride<W>);
        wmma::mma_sync(sums[n], a, b, sums[n]);
      }
    }
  }

  // Rows [first, end) of a head of `to`, times `factor`. `buffer`: the warp's, as large as its scores.
  __device__ __forceinline__ void write(float* buffer, const TileRows& to, int64_t column, int first, int end,
                                        int depth, float factor) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
    for (int n = 0; n < W / kFragment; ++n) {
      if (n * kFragment >= depth) continue;
      __syncwarp();
      wmma::store_matrix_sync(buffer, sums[n], kScoreStride, wmma::mem_row_major);
      __syncwarp();
      for (int i = lane; i < kFragment * kFragment; i += kWarp) {
        const int row = i / kFragment, c = i % kFragment;
        if (first + row >= end) continue;
        reinterpret_cast<bf16*>(to.data)[(first + row) * to.stride + column + n * kFragment + c] =
            __float2bfloat16_rn(buffer[row * kScoreStride + c] * factor);
      }
    }
  }
};

// The sequence that token t is in: the last that begins at or before it. Sequences may be empty.
__device__ __forceinline__ int sequence_of(const TileShape& shape, int t) {
  int low = 0, high = static_cast<int>(shape.sequences);  // it is in [low, high)
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    if (shape.cu_seqlens[middle] <= t) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// The query at token t sees the keys from here to itself. It does not decrease with t.
__device__ __forceinline__ int first_key(const TileShape& shape, int t) {
  const int begin = shape.cu_seqlens ? shape.cu_seqlens[sequence_of(shape, t)] : 0;
  return shape.window > 0 ? max(begin, t - static_cast<int>(shape.window) + 1) : begin;
}

// Queries from here on do not see the key at token t. Does not decrease with t.
__device__ __forceinline__ int end_of_queries(const TileShape& shape, int t) {
  const int64_t end = shape.cu_seqlens ? int64_t{shape.cu_seqlens[sequence_of(shape, t) + 1]} : shape.keys;
  return static_cast<int>(shape.window > 0 ? min(end, t + shape.window) : end);
}

// Blocks of `kernel` along x for every kResident of `rows`, and y.
template <typename Kernel, typename Args>
cudaError_t launch(cudaStream_t stream, Kernel* kernel, size_t shared_bytes, int64_t rows, int64_t y,
                   const Args& args) {
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                  static_cast<int>(shared_bytes));
  if (status != cudaSuccess) return status;
  const dim3 grid(static_cast<unsigned>((rows + kResident - 1) / kResident), static_cast<unsigned>(y));
  kernel<<<grid, kThreads, shared_bytes, stream>>>(args);
  return cudaGetLastError();
}

inline float score_scale(const TileShape& shape) {
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(shape.head_dim)));
}

}  // namespace biomoe::cuda::tiles
