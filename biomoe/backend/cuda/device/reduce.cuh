// Sums and maxima over a warp, a block or the rows of a matrix, in an order that is fixed by the shape.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace biomoe::cuda {

inline constexpr int kWarp = 32;

// All lanes get the sum.
template <typename T>
__device__ __forceinline__ T warp_sum(T value) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  return value;
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, step));
  }
  return value;
}

// All threads of a block of whole warps along x get the sum.
template <typename T>
__device__ __forceinline__ T block_sum(T value) {
  __shared__ T parts[kWarp];
  value = warp_sum(value);
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = value;
  __syncthreads();
  T sum = parts[0];
  for (int warp = 1; warp < warps; ++warp) sum += parts[warp];
  __syncthreads();
  return sum;
}

inline constexpr int kSumColumns = 32;  // of a block that sums columns
inline constexpr int kSumRows = 32;

// The sum over rows of x[r * stride], for each column threadIdx.x of a block of kSumColumns x kSumRows
// threads; only those of threadIdx.y = 0 get it.
template <typename T>
__device__ __forceinline__ T column_sum(const T* x, int64_t rows, int64_t stride) {
  __shared__ T parts[kSumRows][kSumColumns + 1];
  T sum = 0;
#pragma unroll 4
  for (int64_t row = threadIdx.y; row < rows; row += kSumRows) sum += x[row * stride];
  parts[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0) return sum;
#pragma unroll
  for (int row = 1; row < kSumRows; ++row) sum += parts[row][threadIdx.x];
  return sum;
}

// emit(c, sum over rows of x[r * columns + c]) for every column; launched with ceil(columns / kSumColumns)
// blocks of kSumColumns x kSumRows threads.
template <typename T, typename Emit>
__global__ void column_sums(const T* x, int64_t rows, int64_t columns, Emit emit) {
  const int64_t column = int64_t{blockIdx.x} * kSumColumns + threadIdx.x;
  const bool present = column < columns;
  const T sum = column_sum(x + (present ? column : 0), present ? rows : 0, columns);
  if (threadIdx.y == 0 && present) emit(column, sum);
}

}  // namespace biomoe::cuda
