#include "biomoe/backend/cpu/sgemm.h"

#include <dnnl.h>
#include <omp.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "biomoe/backend/cpu/parallel.h"

namespace biomoe::cpu {
namespace {

// Where rows and columns from (row, column) of op(matrix) begin in memory.
Matrix shifted(const Matrix& matrix, int64_t row, int64_t column) {
  Matrix part = matrix;
  part.data += matrix.transposed ? column * matrix.stride + row : row * matrix.stride + column;
  return part;
}

}  // namespace

OneThreadPerProduct::OneThreadPerProduct() : threads_before_(omp_get_max_threads()) {
  omp_set_num_threads(1);
}

OneThreadPerProduct::~OneThreadPerProduct() {
  omp_set_num_threads(threads_before_);
}

void sgemm(const Product& c, const Matrix& a, const Matrix& b) {
  if (c.rows == 0 || c.columns == 0) return;
  if (c.inner == 0) {
    if (c.accumulate) return;
    for (int64_t row = 0; row < c.rows; ++row) std::fill_n(c.data + row * c.stride, c.columns, 0.0f);
    return;
  }
  const dnnl_status_t status =
      dnnl_sgemm(a.transposed ? 'T' : 'N', b.transposed ? 'T' : 'N', c.rows, c.columns, c.inner, 1.0f, a.data,
                 a.stride, b.data, b.stride, c.accumulate ? 1.0f : 0.0f, c.data, c.stride);
  if (status == dnnl_success) return;
  std::fprintf(stderr, "biomoe: oneDNN failed with status %d on a product of %lld x %lld x %lld\n",
               static_cast<int>(status), static_cast<long long>(c.rows), static_cast<long long>(c.columns),
               static_cast<long long>(c.inner));
  std::abort();
}

Tiling tile_product(int64_t rows, int64_t columns, int64_t inner, int64_t enough_tiles) {
  if (rows == 0 || columns == 0) return {};
  constexpr int64_t kMaxRows = 256;
  constexpr int64_t kMaxColumns = 512;
  constexpr int64_t kMinSide = 128;      // a smaller tile spends its time on copying operands
  constexpr int64_t kMinWork = 1 << 21;  // multiply-adds; some 25 microseconds
  int64_t tile_rows = std::min(rows, kMaxRows);
  int64_t tile_columns = std::min(columns, kMaxColumns);
  for (;;) {
    const Tiling tiling{ceil_div(rows, tile_rows), ceil_div(columns, tile_columns)};
    const int64_t longer = std::max(tile_rows, tile_columns);
    if (tiling.count() >= enough_tiles || longer < 2 * kMinSide ||
        tile_rows * tile_columns * std::max<int64_t>(1, inner) < 2 * kMinWork) {
      return tiling;
    }
    (tile_rows == longer ? tile_rows : tile_columns) = ceil_div(longer, 2);
  }
}

void sgemm_tile(const Product& c, const Matrix& a, const Matrix& b, const Tiling& tiling, int64_t tile) {
  // Neighbouring tiles share their rows of a and go through b.
  const Range rows = split_range(c.rows, tiling.row_tiles, tile / tiling.column_tiles);
  const Range columns = split_range(c.columns, tiling.column_tiles, tile % tiling.column_tiles);
  Product part = c;
  part.data += rows.begin * c.stride + columns.begin;
  part.rows = rows.count();
  part.columns = columns.count();
  sgemm(part, shifted(a, rows.begin, 0), shifted(b, 0, columns.begin));
}

}  // namespace biomoe::cpu
