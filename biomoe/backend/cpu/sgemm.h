// Row-major single-precision products on the calling thread.
#pragma once

#include <cstdint>

#include "biomoe/backend/cpu/parallel.h"

namespace biomoe::cpu {

// An operand as it lies in memory; `stride` elements from one row to the next.
struct Matrix {
  const float* data = nullptr;
  int64_t stride = 0;
  bool transposed = false;
};

// The result, and how it is written.
struct Product {
  float* data = nullptr;
  int64_t stride = 0;
  int64_t rows = 0;     // M
  int64_t columns = 0;  // N
  int64_t inner = 0;    // the size summed over
  bool accumulate = false;
};

// What the same thread will probably multiply next: its b is asked for from memory meanwhile.
struct NextProduct {
  Product c{};
  Matrix b{};
};

// c = a b, or c += a b. Any size may be 0; without accumulate what c held is ignored, NaN included. Neither
// allocates nor throws. An element of c depends on its row of a and its column of b alone, to the bit.
void sgemm(const Product& c, const Matrix& a, const Matrix& b, const NextProduct& next = {});

// Columns of the block of the result that the kernel keeps in registers: two of the widest vectors.
#if defined(__AVX512F__)
inline constexpr int64_t kSgemmColumns = 32;
#elif defined(__AVX__)
inline constexpr int64_t kSgemmColumns = 16;
#else
inline constexpr int64_t kSgemmColumns = 8;
#endif

// As sgemm, but nothing is copied: for operands that lie in the caches near the core, with strides that are
// no multiples of a large power of two. b is row-major; its rows must be readable to a multiple of
// kSgemmColumns.
void sgemm_in_place(const Product& c, const Matrix& a, const float* b, int64_t b_stride);

// How a product is cut into tiles that different threads may compute. It depends on the
// sizes and orders alone, so that the order of every sum, and with it the result, is the same for any number
// of threads.
struct Tiling {
  int64_t row_tiles = 0;
  int64_t column_tiles = 0;
  int64_t count() const { return row_tiles * column_tiles; }
};
// Tiles are made smaller than their best size only until there are enough_tiles to share among threads.
inline constexpr int64_t kEnoughTiles = 16;
Tiling tile_product(const Product& c, const Matrix& a, int64_t enough_tiles = kEnoughTiles);

// Tile `tile` of [0, tiling.count()), which is a product by itself, and its rows.
struct Tile {
  Range rows;
  Product c;
  Matrix a, b;
};
Tile tile_of(const Product& c, const Matrix& a, const Matrix& b, const Tiling& tiling, int64_t tile);

}  // namespace biomoe::cpu
