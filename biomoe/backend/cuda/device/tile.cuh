// Tiles of a matrix in the registers of a block of threads: their amax, scales, and codes on the way to being
// transposed.
#pragma once

#include "biomoe/backend/cuda/device/fp8.cuh"
#include "biomoe/backend/cuda/device/reduce.cuh"
#include "biomoe/backend/cuda/device/vector.cuh"
#include "biomoe/quant/scaling.h"

namespace biomoe::cuda {

inline constexpr int kTileThreads = 256;

// Each thread of a tile of kRows holds eight columns of eight rows, in two fours.
template <int kRows>
struct TileShape {
  static constexpr int kColumns = kTileThreads * 64 / kRows;
  static constexpr int kVectors = kColumns / 8;
  static constexpr int kThreadRows = kTileThreads / kVectors;  // threads above each other
  static constexpr int kHeld = kRows / kThreadRows;
  static_assert(kHeld == 8);

  __device__ static int vector() { return static_cast<int>(threadIdx.x) % kVectors; }
  __device__ static int thread_row() { return static_cast<int>(threadIdx.x) / kVectors; }
  // Of held row i, within the tile: four rows are a quad; step(i) is from held row 0.
  __device__ static int quad(int i) { return thread_row() + i / 4 * kThreadRows; }
  __device__ static int row(int i) { return 4 * quad(i) + i % 4; }
  __device__ static constexpr int step(int i) { return i / 4 * 4 * kThreadRows + i % 4; }
};

// The larger of each element of two words. NaN is dropped, but where both are.
template <typename T>
__device__ __forceinline__ unsigned larger(unsigned a, unsigned b) {
  if constexpr (sizeof(T) == 2) {
    asm("max.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
    return a;
  } else {
    return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
  }
}

template <typename T>
__device__ __forceinline__ Pack<T, 8> magnitudes(Pack<T, 8> x) {
#pragma unroll
  for (unsigned& word : x.words) word &= sizeof(T) == 2 ? 0x7fff7fffu : 0x7fffffffu;
  return x;
}

// Raises each of `amax`, which is not NaN, to the magnitude of x; NaN is dropped.
template <typename T>
__device__ __forceinline__ void raise(Pack<T, 8>& amax, const Pack<T, 8>& x) {
  const Pack<T, 8> m = magnitudes(x);
#pragma unroll
  for (int w = 0; w < Pack<T, 8>::kWords; ++w) amax.words[w] = larger<T>(amax.words[w], m.words[w]);
}

// The largest magnitude of eight elements, NaN aside.
template <typename T>
__device__ __forceinline__ float largest_magnitude(const Pack<T, 8>& x) {
  Pack<T, 8> m = magnitudes(x);
#pragma unroll
  for (int width = Pack<T, 8>::kWords / 2; width > 0; width /= 2) {
#pragma unroll
    for (int w = 0; w < width; ++w) m.words[w] = larger<T>(m.words[w], m.words[w + width]);
  }
  const float largest = fmaxf(0.0f, m[0]);
  return sizeof(T) == 2 ? fmaxf(largest, m[1]) : largest;
}

// The largest of a block of threads, in all of them.
__device__ __forceinline__ float block_max(float value) {
  __shared__ float parts[kTileThreads / kWarp];
  value = warp_max(value);
  if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = value;
  __syncthreads();
  float largest = parts[0];
#pragma unroll
  for (int warp = 1; warp < kTileThreads / kWarp; ++warp) largest = fmaxf(largest, parts[warp]);
  __syncthreads();
  return largest;
}

// Scales of a tile's columns, from the amax of each thread's: emit(column, amax, scale) once for each. In
// shared memory columns lie in fours, so that neighbouring threads are on neighbouring banks.
template <Fp8Format kFormat, class Tile, typename T, typename Emit>
__device__ __forceinline__ void scale_columns(ScaleRule rule, Pack<T, 8> amax, float (&multiply)[8],
                                              float (&inverse)[8], const Emit& emit) {
  constexpr int kTogether = Tile::kVectors < kWarp ? kWarp / Tile::kVectors : 1;  // rows of threads in a warp
  constexpr int kParts = Tile::kThreadRows / kTogether;
  __shared__ float4 parts[kParts][2][Tile::kVectors];
  __shared__ float4 scales[2][2][Tile::kVectors];
#pragma unroll
  for (int step = kWarp / 2; step >= Tile::kVectors; step /= 2) {
#pragma unroll
    for (unsigned& word : amax.words) word = larger<T>(word, __shfl_xor_sync(0xffffffffu, word, step));
  }
  if (Tile::thread_row() % kTogether == 0) {
    float4(&part)[2][Tile::kVectors] = parts[Tile::thread_row() / kTogether];
    part[0][Tile::vector()] = make_float4(amax[0], amax[1], amax[2], amax[3]);
    part[1][Tile::vector()] = make_float4(amax[4], amax[5], amax[6], amax[7]);
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < Tile::kColumns; i += kTileThreads) {
    float largest = reinterpret_cast<const float*>(parts[0])[i];
#pragma unroll
    for (int row = 1; row < kParts; ++row) {
      largest = fmaxf(largest, reinterpret_cast<const float*>(parts[row])[i]);
    }
    const BlockScale scale = block_scale(largest, kFormat, rule);
    reinterpret_cast<float*>(scales[0])[i] = scale.multiply;
    reinterpret_cast<float*>(scales[1])[i] = scale.inverse;
    const int four = i / 4;
    emit(four % Tile::kVectors * 8 + four / Tile::kVectors * 4 + i % 4, largest, scale);
  }
  __syncthreads();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    *reinterpret_cast<float4*>(multiply + 4 * half) = scales[0][half][Tile::vector()];
    *reinterpret_cast<float4*>(inverse + 4 * half) = scales[1][half][Tile::vector()];
  }
}

template <Fp8Format kFormat>
__device__ __forceinline__ uint2 encode_eight(const float (&values)[8], const float (&multiply)[8]) {
  uint32_t codes[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float scaled[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) scaled[j] = values[4 * half + j] * multiply[4 * half + j];
    codes[half] = encode_four<kFormat>(scaled);
  }
  return make_uint2(codes[0], codes[1]);
}

// Codes of eight columns and four rows to where the columns are rows, `stride` bytes apart; four bytes at a
// time.
__device__ __forceinline__ void store_transposed(uint8_t* to, int64_t stride, const uint2 (&codes)[4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = half == 0 ? codes[i].x : codes[i].y;
    transpose_bytes(words);
#pragma unroll
    for (int j = 0; j < 4; ++j) *reinterpret_cast<uint32_t*>(to + (4 * half + j) * stride) = words[j];
  }
}

// Codes of a tile of 128 x 128 in shared memory: words of four rows of a column, of which those of a column
// lie in an order that leaves neither the writes nor the reads a conflict of banks.
class TransposedTile {
 public:
  // Codes of eight columns and the four rows of `quad`.
  __device__ void put(int vector, int quad, const uint2 (&codes)[4]) {
    uint32_t left[4], right[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      left[i] = codes[i].x;
      right[i] = codes[i].y;
    }
    transpose_bytes(left);
    transpose_bytes(right);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      words_[vector * 8 + j][quad ^ 2 * vector] = left[j];
      words_[vector * 8 + 4 + j][quad ^ 2 * vector] = right[j];
    }
  }

  // By the whole block: the codes of the first `rows`, a multiple of 16, of the first `columns`, which begin
  // at `to` with `stride` bytes from one column to the next.
  __device__ void write(uint8_t* to, int64_t stride, int rows, int columns) const {
    constexpr int kStep = kTileThreads / 8;
    const int column = static_cast<int>(threadIdx.x) / 8, piece = static_cast<int>(threadIdx.x) % 8;
    if (16 * piece >= rows) return;
    to += column * stride + 16 * piece;
#pragma unroll
    for (int k = 0; k < 128 / kStep; ++k) {
      const int order = (column + k * kStep) / 8 * 2;
      const uint4 four =
          *reinterpret_cast<const uint4*>(&words_[column + k * kStep][4 * (piece ^ order / 4)]);
      if (column + k * kStep >= columns) return;
      *reinterpret_cast<uint4*>(to + k * kStep * stride) =
          order % 4 == 0 ? four : make_uint4(four.z, four.w, four.x, four.y);
    }
  }

 private:
  alignas(16) uint32_t words_[128][32];
};

}  // namespace biomoe::cuda
