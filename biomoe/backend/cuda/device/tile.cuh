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

// kHeld rows that kLanes neighbouring lanes hold together, shared out: the first kFound values of lane
// i % kFinders are those of rows i % kFinders, i % kFinders + kFinders and so on.
template <int kLanes, int kHeld>
struct SharedOutRows {
  static constexpr int kFinders = kLanes < kHeld ? kLanes : kHeld, kFound = kHeld / kFinders;

  // Combines each row's values of all lanes: neighbours give each other half of their rows until each finder
  // has its own.
  template <typename Combine>
  __device__ __forceinline__ static void combine(float (&values)[kHeld], const Combine& both) {
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
#pragma unroll
    for (int step = 1; step < kFinders; step *= 2) {
#pragma unroll
      for (int i = 0; i < kHeld / 2 / step; ++i) {
        const float even = values[2 * i], odd = values[2 * i + 1];
        const bool keep_odd = (lane & step) != 0;
        values[i] = both(keep_odd ? odd : even, __shfl_xor_sync(0xffffffffu, keep_odd ? even : odd, step));
      }
    }
#pragma unroll
    for (int step = kFinders; step < kLanes; step *= 2) {
#pragma unroll
      for (int k = 0; k < kFound; ++k) {
        values[k] = both(values[k], __shfl_xor_sync(0xffffffffu, values[k], step));
      }
    }
  }
};

// The scales of such rows, so that the divisions are shared out too.
template <int kLanes, int kHeld>
struct RowScales {
  using Rows = SharedOutRows<kLanes, kHeld>;
  BlockScale found[Rows::kFound];

  // Of held row i; by all lanes.
  __device__ __forceinline__ float multiply(int i) const {
    return __shfl_sync(0xffffffffu, found[i / Rows::kFinders].multiply, i % Rows::kFinders, kLanes);
  }
  __device__ __forceinline__ float inverse(int i) const {
    return __shfl_sync(0xffffffffu, found[i / Rows::kFinders].inverse, i % Rows::kFinders, kLanes);
  }
};

// From the amax of what each lane has of the rows, which is used up: emit(held row, amax, scale) once for
// each.
template <Fp8Format kFormat, int kLanes, int kHeld, typename Emit>
__device__ __forceinline__ RowScales<kLanes, kHeld> scale_rows(ScaleRule rule, float (&amax)[kHeld],
                                                               const Emit& emit) {
  using Rows = SharedOutRows<kLanes, kHeld>;
  Rows::combine(amax, [](float a, float b) { return fmaxf(a, b); });
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  RowScales<kLanes, kHeld> scales;
#pragma unroll
  for (int k = 0; k < Rows::kFound; ++k) {
    scales.found[k] = block_scale(amax[k], kFormat, rule);
    if (lane < Rows::kFinders) {
      emit(k * Rows::kFinders + lane % Rows::kFinders, amax[k], scales.found[k]);
    }
  }
  return scales;
}

// Scales of a tile's columns, in shared memory. A thread has kPacks packs of eight columns: those of pack p
// are numbered from 8 (p kVectors + vector()) on. Here columns lie in fours, so that neighbouring threads are
// on neighbouring banks.
template <class Tile, int kPacks = 1>
class ColumnScales {
 public:
  // By the whole block, from the amax of each thread's: emit(column, amax, scale) once for each.
  template <Fp8Format kFormat, typename T, typename Emit>
  __device__ __forceinline__ void find(ScaleRule rule, Pack<T, 8> (&amax)[kPacks], const Emit& emit) {
#pragma unroll
    for (int pack = 0; pack < kPacks; ++pack) {
      Pack<T, 8>& largest = amax[pack];
#pragma unroll
      for (int step = kWarp / 2; step >= Tile::kVectors; step /= 2) {
#pragma unroll
        for (unsigned& word : largest.words) {
          word = larger<T>(word, __shfl_xor_sync(0xffffffffu, word, step));
        }
      }
      if (Tile::thread_row() % kTogether == 0) {
        float4(&part)[2][kAll] = parts_[Tile::thread_row() / kTogether];
        part[0][at(pack)] = make_float4(largest[0], largest[1], largest[2], largest[3]);
        part[1][at(pack)] = make_float4(largest[4], largest[5], largest[6], largest[7]);
      }
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < 8 * kAll; i += kTileThreads) {
      float largest = reinterpret_cast<const float*>(parts_[0])[i];
#pragma unroll
      for (int row = 1; row < kParts; ++row) {
        largest = fmaxf(largest, reinterpret_cast<const float*>(parts_[row])[i]);
      }
      const BlockScale scale = block_scale(largest, kFormat, rule);
      reinterpret_cast<float*>(scales_[0])[i] = scale.multiply;
      reinterpret_cast<float*>(scales_[1])[i] = scale.inverse;
      const int four = i / 4;
      emit(four % kAll * 8 + four / kAll * 4 + i % 4, largest, scale);
    }
    __syncthreads();
  }

  // Of this thread's columns, once they are found.
  __device__ __forceinline__ void multiply(float (&to)[8], int pack = 0) const {
    read(0, to, pack);
  }
  __device__ __forceinline__ void inverse(float (&to)[8], int pack = 0) const {
    read(1, to, pack);
  }

 private:
  static constexpr int kAll = kPacks * Tile::kVectors;
  // Rows of threads in a warp.
  static constexpr int kTogether = Tile::kVectors < kWarp ? kWarp / Tile::kVectors : 1;
  static constexpr int kParts = Tile::kThreadRows / kTogether;

  __device__ static int at(int pack) {
    return pack * Tile::kVectors + Tile::vector();
  }
  __device__ __forceinline__ void read(int which, float (&to)[8], int pack) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      *reinterpret_cast<float4*>(to + 4 * half) = scales_[which][half][at(pack)];
    }
  }

  float4 parts_[kParts][2][kAll];
  float4 scales_[2][2][kAll];
};

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

template <Fp8Format kFormat, typename T>
__device__ __forceinline__ uint2 encode_eight(const Pack<T, 8>& pack, const float (&multiply)[8]) {
  float values[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) values[j] = pack[j];
  return encode_eight<kFormat>(values, multiply);
}
template <Fp8Format kFormat, typename T>
__device__ __forceinline__ uint2 encode_eight(const Pack<T, 8>& pack, float multiply) {
  float of_each[8];
#pragma unroll
  for (float& scale : of_each) scale = multiply;
  return encode_eight<kFormat>(pack, of_each);
}

template <Fp8Format kFormat>
__device__ __forceinline__ void decode_eight(const uint2& codes, const float (&inverse)[8],
                                             float (&values)[8]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float decoded[4];
    decode_four<kFormat>(half == 0 ? codes.x : codes.y, decoded);
#pragma unroll
    for (int j = 0; j < 4; ++j) values[4 * half + j] = decoded[j] * inverse[4 * half + j];
  }
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

// Codes of a tile of 128 rows in shared memory, of kVectors (8 or 16) times eight columns: words of four rows
// of a column, of which those of a column lie in an order that leaves neither the writes nor the reads a
// conflict of banks.
template <int kVectors = 16>
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
      words_[vector * 8 + j][quad ^ kSpread * vector] = left[j];
      words_[vector * 8 + 4 + j][quad ^ kSpread * vector] = right[j];
    }
  }

  // By the whole block: the codes of the first `rows`, a multiple of 16, of the first `columns`, to
  // place(column) and what follows.
  template <Reuse kReuse = Reuse::kKeep, typename Place>
  __device__ void write(int rows, int columns, const Place& place) const {
    constexpr int kStep = kTileThreads / 8;
    const int first = static_cast<int>(threadIdx.x) / 8, piece = static_cast<int>(threadIdx.x) % 8;
    if (16 * piece >= rows) return;
#pragma unroll
    for (int k = 0; k < 8 * kVectors / kStep; ++k) {
      const int column = first + k * kStep, order = column / 8 * kSpread;
      const uint4 four = *reinterpret_cast<const uint4*>(&words_[column][4 * (piece ^ order / 4)]);
      if (column >= columns) return;
      auto* to = reinterpret_cast<uint4*>(place(column) + 16 * piece);
      const uint4 codes = order % 4 == 0 ? four : make_uint4(four.z, four.w, four.x, four.y);
      if constexpr (kReuse == Reuse::kStream) {
        __stcs(to, codes);
      } else {
        *to = codes;
      }
    }
  }

 private:
  static constexpr int kSpread = 32 / kVectors;
  alignas(16) uint32_t words_[8 * kVectors][32];
};

}  // namespace biomoe::cuda
