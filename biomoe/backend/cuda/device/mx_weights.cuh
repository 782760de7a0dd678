// MxWeights of a tile of weights, by a block of threads.
#pragma once

#include "biomoe/backend/cuda/device/tile.cuh"
#include "biomoe/ops/mx_weights.h"

namespace biomoe::cuda {

template <typename T>
struct MxWeightPointers {
  ScaleRule rule;
  T* values;
  uint8_t* column_scales;
  uint32_t* differ;
  int64_t in;
};

template <typename T>
MxWeightPointers<T> mx_weight_pointers(const MxWeights& weights) {
  return {weights.rule, static_cast<T*>(weights.values_EOI.data),
          static_cast<uint8_t*>(weights.column_scales_BI.data),
          static_cast<uint32_t*>(weights.differ_BS.data), weights.values_EOI.shape[2]};
}

// Tiles are of 32 rows and 512 columns, of which those at the right edge may be cut short.
using MxTile = TileShape<32>;
inline int64_t mx_tiles(const MxWeights& weights) {
  const Shape& shape = weights.values_EOI.shape;
  return shape[0] * (shape[1] / 32) * ((shape[2] + MxTile::kColumns - 1) / MxTile::kColumns);
}

// The part of tile blockIdx.x that a thread has.
struct MxTilePart {
  int64_t band, first_column, first;  // of the tile; of the thread, its first element
  int64_t in;
  bool present;
  __device__ explicit MxTilePart(int64_t columns) : in(columns) {
    const auto tiles = static_cast<unsigned>((in + MxTile::kColumns - 1) / MxTile::kColumns);
    band = blockIdx.x / tiles;
    first_column = int64_t{blockIdx.x % tiles} * MxTile::kColumns;
    const int64_t column = first_column + MxTile::vector() * 8;
    first = (band * 32 + MxTile::row(0)) * in + column;
    present = column < in;
  }
  __device__ int64_t at(int i) const { return first + MxTile::step(i) * in; }
};

// Eight elements of what they are in blocks with these scales, rounded to T.
template <typename T>
__device__ __forceinline__ Pack<T, 8> mx_rounded(const Pack<T, 8>& x, const float (&multiply)[8],
                                                 const float (&inverse)[8]) {
  float values[8];
  decode_eight<Fp8Format::kE4M3>(encode_eight<Fp8Format::kE4M3>(x, multiply), inverse, values);
  Pack<T, 8> result;
  result.set(values);
  return result;
}

// By the whole block; weights(i) are those of held row i, zeros where the thread has none.
template <Reuse kReuse, typename T, typename Weights>
__device__ __forceinline__ void write_mx_tile(const MxWeightPointers<T>& to, const MxTilePart& part,
                                              const Weights& weights) {
  constexpr int kLanes = 4, kSquares = MxTile::kColumns / 32;
  __shared__ ColumnScales<MxTile> columns;
  __shared__ uint32_t differ[MxTile::kThreadRows][kSquares];
  Pack<T, 8> column_amax[1]{};
  float row_amax[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const Pack<T, 8> w = weights(i);
    raise(column_amax[0], w);
    row_amax[i] = largest_magnitude(w);
  }
  columns.template find<Fp8Format::kE4M3>(to.rule, column_amax, [&](int c, float, const BlockScale& scale) {
    const int64_t column = part.first_column + c;
    if (column < to.in) to.column_scales[part.band * to.in + column] = scale.e8m0;
  });
  const auto rows =
      scale_rows<Fp8Format::kE4M3, kLanes>(to.rule, row_amax, [](int, float, const BlockScale&) {});
  float multiply[8], inverse[8];
  columns.multiply(multiply);
  columns.inverse(inverse);
  uint32_t of_thread = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float row_multiply[8], row_inverse[8];
    const float m = rows.multiply(i), v = rows.inverse(i);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      row_multiply[j] = m;
      row_inverse[j] = v;
    }
    const Pack<T, 8> w = weights(i);
    const Pack<T, 8> by_row = mx_rounded(w, row_multiply, row_inverse),
                     by_column = mx_rounded(w, multiply, inverse);
    bool same = true;
#pragma unroll
    for (int word = 0; word < Pack<T, 8>::kWords; ++word)
      same = same && by_row.words[word] == by_column.words[word];
    of_thread |= same ? 0u : 1u << MxTile::row(i);
    if (part.present) store<kReuse>(to.values + part.at(i), by_row);
  }
  of_thread |= __shfl_xor_sync(0xffffffffu, of_thread, 1);
  of_thread |= __shfl_xor_sync(0xffffffffu, of_thread, 2);
  if (MxTile::vector() % kLanes == 0) differ[MxTile::thread_row()][MxTile::vector() / kLanes] = of_thread;
  __syncthreads();
  const int square = static_cast<int>(threadIdx.x);
  if (square >= kSquares || part.first_column + square * 32 >= to.in) return;
  uint32_t of_square = 0;
#pragma unroll
  for (int row = 0; row < MxTile::kThreadRows; ++row) of_square |= differ[row][square];
  to.differ[part.band * (to.in / 32) + part.first_column / 32 + square] = of_square;
}

}  // namespace biomoe::cuda
