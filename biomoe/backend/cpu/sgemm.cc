// Products by packing and a register-blocked kernel (Goto and van de Geijn, "Anatomy of high-performance
// matrix multiplication", 2008). Both operands are copied, block by block, into panels in the order in which
// the kernel reads them; the copies live in two buffers of each thread, so that no call allocates.
//
// Every element of the result is the sum over kDepth-long pieces of the inner size, each summed in order with
// one accumulator, whatever the place of the element in its matrix: it does not depend on how a product is
// cut.
#include "biomoe/backend/cpu/sgemm.h"

#include <algorithm>
#include <cstring>

#include "biomoe/backend/cpu/transpose.h"

namespace biomoe::cpu {
namespace {

// Vectors of the widest registers that the target has, and a block of the result that fills its registers:
// kRows x 2 accumulators, two vectors of b, and one element of a in all lanes.
#if defined(__AVX512F__)
constexpr int64_t kVectorBytes = 64;
constexpr int64_t kRows = 12;
#elif defined(__AVX__)
constexpr int64_t kVectorBytes = 32;
constexpr int64_t kRows = 6;
#else
constexpr int64_t kVectorBytes = 16;
constexpr int64_t kRows = 6;
#endif
typedef float Vector __attribute__((vector_size(kVectorBytes)));
constexpr int64_t kLanes = kVectorBytes / static_cast<int64_t>(sizeof(float));
constexpr int64_t kColumns = kSgemmColumns;
static_assert(kColumns == 2 * kLanes);

// A block of b stays in the level 2 cache, and kRows rows of a in the level 1 cache while the block passes
// by.
constexpr int64_t kDepth = 256;
constexpr int64_t kBlockRows = 192;
constexpr int64_t kBlockColumns = 256;
static_assert(kBlockRows % kRows == 0 && kBlockColumns % kColumns == 0);

alignas(128) thread_local float packed_a[kBlockRows * kDepth];
alignas(128) thread_local float packed_b[kBlockColumns * kDepth];

Vector load(const float* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof(vector));
  return vector;
}

void store(float* to, Vector vector) {
  std::memcpy(to, &vector, sizeof(vector));
}

// to[j * to_stride + i] = from[i * from_stride + j] for i, j < 4.
inline void transpose_4x4(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  const auto columns = transposed({load_quad(from), load_quad(from + from_stride),
                                   load_quad(from + 2 * from_stride), load_quad(from + 3 * from_stride)});
  for (int64_t j = 0; j < 4; ++j) store_quad(to + j * to_stride, columns[static_cast<size_t>(j)]);
}

// An operand seen as `count` lines (rows of a, columns of b) of `depth` elements.
struct Lines {
  const float* data;
  int64_t stride;
  bool contiguous_depth;  // element k of line i at i * stride + k, else at k * stride + i
};

constexpr int64_t kLineElements = 16;  // of a cache line
constexpr int64_t kManyElements = 128;

// So many elements of lines that lie side by side are copied before the next ones: panel by panel, neighbours
// in memory would have left the cache before their turn.
constexpr int64_t kPiece = 8;

// A panel of lines that lie side by side. Compiled once: inlined into its callers it is not always unrolled.
template <int64_t width>
[[gnu::noinline]] void pack_columns(const Lines& lines, int64_t depth, float* panel) {
  for (int64_t k = 0; k < depth; ++k) {
    std::memcpy(panel + k * width, lines.data + k * lines.stride, width * sizeof(float));
    // For the next piece. It may lie past the end, where a prefetch does nothing.
    for (int64_t i = 0; i < width; i += kLineElements) {
      __builtin_prefetch(lines.data + (k + kPiece) * lines.stride + i);
    }
  }
}

// Elements [k, k + count) of a panel's lines, count a multiple of four.
template <int64_t width>
inline void transpose_lines(const Lines& lines, int64_t k, int64_t count, float* panel) {
  // The last quad of lines overlaps the one before it when the width is no multiple of four.
  for (int64_t i = 0; i < width; i += 4) {
    const int64_t line = std::min(i, width - 4);
    const float* from = lines.data + line * lines.stride + k;
    for (int64_t j = 0; j < count; j += 4) {
      transpose_4x4(from + j, lines.stride, panel + (k + j) * width + line, width);
    }
  }
}

// One panel of a whole `width` of lines: [depth][width].
template <int64_t width>
void pack_panel(const Lines& lines, int64_t depth, float* panel) {
  static_assert(width >= 4);
  if (!lines.contiguous_depth) {
    pack_columns<width>(lines, depth, panel);
    return;
  }
  int64_t k = 0;
  // Four lines at a time give up a line of the cache each: all of the panel's at once would be more, at some
  // strides, than a set of the cache holds.
  for (; k + kLineElements <= depth; k += kLineElements) {
    // The next panel's lines: so many short streams that hardware foresees none.
    for (int64_t i = width; depth >= kManyElements && i < 2 * width; ++i) {
      __builtin_prefetch(lines.data + i * lines.stride + k);
    }
    transpose_lines<width>(lines, k, kLineElements, panel);
  }
  const int64_t rest = (depth - k) / 4 * 4;
  transpose_lines<width>(lines, k, rest, panel);
  k += rest;
  for (; k < depth; ++k) {
    for (int64_t i = 0; i < width; ++i) panel[k * width + i] = lines.data[i * lines.stride + k];
  }
}

// The last panel, of fewer lines, filled up with zeros.
template <int64_t width>
void pack_rest(const Lines& lines, int64_t rest, int64_t depth, float* panel) {
  for (int64_t k = 0; k < depth; ++k) {
    for (int64_t i = 0; i < rest; ++i) {
      panel[k * width + i] = lines.data[lines.contiguous_depth ? i * lines.stride + k : k * lines.stride + i];
    }
    std::fill(panel + k * width + rest, panel + (k + 1) * width, 0.0f);
  }
}

// Panels of `width` lines one after the other.
template <int64_t width>
[[gnu::noinline]] void pack(const Lines& lines, int64_t count, int64_t depth, float* packed) {
  const int64_t piece = lines.contiguous_depth ? depth : kPiece;
  const int64_t whole = count / width * width;
  for (int64_t begin = 0; begin < depth; begin += piece) {
    for (int64_t first = 0; first < whole; first += width) {
      Lines part = lines;
      part.data += lines.contiguous_depth ? first * lines.stride : begin * lines.stride + first;
      pack_panel<width>(part, std::min(piece, depth - begin), packed + first * depth + begin * width);
    }
  }
  if (whole == count) return;
  Lines last = lines;
  last.data += whole * (lines.contiguous_depth ? lines.stride : 1);
  pack_rest<width>(last, count - whole, depth, packed + whole * depth);
}

// Where element (row, k) of an operand's panel lies: at row * row_step + k * depth_step.
struct PackedSteps {
  static constexpr int64_t row_step = 1;
  static constexpr int64_t depth_step = kRows;
};
struct RowMajorSteps {
  int64_t row_step;
  static constexpr int64_t depth_step = 1;
};
struct ColumnMajorSteps {
  static constexpr int64_t row_step = 1;
  int64_t depth_step;
};
// And element (k, column) of b's, columns side by side.
struct PackedColumns {
  static constexpr int64_t depth_step = kColumns;
};
struct RowsOfB {
  int64_t depth_step;
};

// c (rows x vectors kLanes) = or += rows of a times as many columns of b.
template <bool accumulate, int64_t rows, int64_t vectors, typename Steps, typename StepsOfB>
[[gnu::noinline]] void multiply_panel(const float* a, Steps steps, const float* b, StepsOfB steps_of_b,
                                      int64_t depth, float* c, int64_t stride) {
  Vector sums[rows][vectors] = {};
  if constexpr (accumulate) {  // to have come when the sums are ready
    for (int64_t i = 0; i < rows; ++i) {
      __builtin_prefetch(c + i * stride, 1);
      __builtin_prefetch(c + i * stride + vectors * kLanes - 1, 1);
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vector row_of_b[vectors];
#pragma GCC unroll 2
    for (int64_t j = 0; j < vectors; ++j) row_of_b[j] = load(b + k * steps_of_b.depth_step + j * kLanes);
#pragma GCC unroll 16
    for (int64_t i = 0; i < rows; ++i) {
      const Vector lanes = a[i * steps.row_step + k * steps.depth_step] - Vector{};
#pragma GCC unroll 2
      for (int64_t j = 0; j < vectors; ++j) sums[i][j] += lanes * row_of_b[j];
    }
  }
#pragma GCC unroll 16
  for (int64_t i = 0; i < rows; ++i) {
#pragma GCC unroll 2
    for (int64_t j = 0; j < vectors; ++j) {
      float* to = c + i * stride + j * kLanes;
      if constexpr (accumulate) sums[i][j] += load(to);
      store(to, sums[i][j]);
    }
  }
}

// multiply_panel for a number of rows known only here: for the last few rows of a matrix.
template <bool accumulate, int64_t vectors, typename Steps, typename StepsOfB, int64_t rows = kRows>
void multiply_rows(int64_t count, const float* a, Steps steps, const float* b, StepsOfB steps_of_b,
                   int64_t depth, float* c, int64_t stride) {
  if (count == rows) {
    multiply_panel<accumulate, rows, vectors>(a, steps, b, steps_of_b, depth, c, stride);
  } else if constexpr (rows > 1) {
    multiply_rows<accumulate, vectors, Steps, StepsOfB, rows - 1>(count, a, steps, b, steps_of_b, depth, c,
                                                                  stride);
  }
}

// c = or += `from`, [rows][kColumns], of which so many rows and columns are there.
template <bool accumulate>
void put(const float* from, int64_t rows, int64_t columns, float* c, int64_t stride) {
  for (int64_t i = 0; i < rows; ++i) {
    float* row = c + i * stride;
    for (int64_t j = 0; j < columns; ++j) row[j] = (accumulate ? row[j] : 0.0f) + from[i * kColumns + j];
  }
}

// A block of a, by panels of kRows rows. Rows that lie one after the other are read where they are.
struct BlockOfA {
  BlockOfA(const Matrix& a, int64_t rows, int64_t depth_in)
      // Rows a multiple of 4 KB apart fall into one set of the level 1 cache, which has eight ways.
      : matrix(a), depth(depth_in), copied(a.transposed || (kRows > 8 && a.stride % 1024 == 0)) {
    if (copied) pack<kRows>({a.data, a.stride, !a.transposed}, rows, depth, packed_a);
  }
  // c = or += `rows` rows of this from `row` on times `vectors` kLanes columns of b. Asks for elements
  // [ask.begin, ask.end) of each of the next rows.
  template <bool accumulate, int64_t vectors>
  void multiply(int64_t row, int64_t rows, Range ask, const float* b, float* c, int64_t stride) const {
    if (copied) {
      multiply_rows<accumulate, vectors>(rows, packed_a + row * depth, PackedSteps{}, b, PackedColumns{},
                                         depth, c, stride);
      return;
    }
    const float* panel = matrix.data + row * matrix.stride;
    for (int64_t k = ask.begin; k < ask.end; k += kLineElements) {
      for (int64_t i = 0; i < kRows; ++i) __builtin_prefetch(panel + (kRows + i) * matrix.stride + k);
    }
    multiply_rows<accumulate, vectors>(rows, panel, RowMajorSteps{matrix.stride}, b, PackedColumns{}, depth,
                                       c, stride);
  }
  Matrix matrix;
  int64_t depth;
  bool copied;
};

// What is copied next, asked for bit by bit while the kernel runs: it comes from memory.
class Ahead {
 public:
  Ahead() = default;
  Ahead(const Lines& lines, int64_t count, int64_t depth, int64_t calls)
      : data_(lines.data), stride_(lines.stride) {
    const int64_t width = lines.contiguous_depth ? depth : count;
    across_ = ceil_div(width, kLineElements);
    left_ = across_ * (lines.contiguous_depth ? count : depth);
    a_call_ = ceil_div(left_, std::max<int64_t>(1, calls));
  }
  void ask() {
    const int64_t some = std::min(left_, a_call_);
    left_ -= some;
    for (int64_t i = 0; i < some; ++i) {
      __builtin_prefetch(data_ + at_ * kLineElements, 0, 2);
      if (++at_ == across_) {
        at_ = 0;
        data_ += stride_;
      }
    }
  }

 private:
  const float* data_ = nullptr;
  int64_t stride_ = 0, across_ = 0, left_ = 0, a_call_ = 0, at_ = 0;
};

// c = or += a packed_b; the sizes of c lie within a block.
template <bool accumulate>
void multiply_block(const Product& c, const BlockOfA& a, Ahead& ahead) {
  for (int64_t row = 0; row < c.rows; row += kRows) {
    const int64_t rows = std::min(kRows, c.rows - row);
    for (int64_t column = 0; column < c.columns; column += kColumns) {
      const int64_t columns = std::min(kColumns, c.columns - column);
      const float* b = packed_b + column * a.depth;
      float* part = c.data + row * c.stride + column;
      ahead.ask();
      const Range ask{column * a.depth / c.columns, (column + columns) * a.depth / c.columns};
      if (columns == kColumns) {
        a.multiply<accumulate, 2>(row, rows, ask, b, part, c.stride);
        continue;
      }
      float whole[kRows * kColumns];
      if (columns <= kLanes) {
        a.multiply<false, 1>(row, rows, ask, b, whole, kColumns);
      } else {
        a.multiply<false, 2>(row, rows, ask, b, whole, kColumns);
      }
      put<accumulate>(whole, rows, columns, part, c.stride);
    }
  }
}

template <bool accumulate, typename Steps>
void multiply_in_place(const Product& c, const float* a, Steps steps, const float* b, RowsOfB steps_of_b) {
  for (int64_t row = 0; row < c.rows; row += kRows) {
    const int64_t rows = std::min(kRows, c.rows - row);
    const float* panel = a + row * steps.row_step;
    for (int64_t column = 0; column < c.columns; column += kColumns) {
      const int64_t columns = std::min(kColumns, c.columns - column);
      float* part = c.data + row * c.stride + column;
      if (columns == kColumns) {
        multiply_rows<accumulate, 2>(rows, panel, steps, b + column, steps_of_b, c.inner, part, c.stride);
        continue;
      }
      float whole[kRows * kColumns];
      multiply_rows<false, 2>(rows, panel, steps, b + column, steps_of_b, c.inner, whole, kColumns);
      put<accumulate>(whole, rows, columns, part, c.stride);
    }
  }
}

// Where rows and columns from (row, column) of op(matrix) begin in memory.
Matrix shifted(const Matrix& matrix, int64_t row, int64_t column) {
  Matrix part = matrix;
  part.data += matrix.transposed ? column * matrix.stride + row : row * matrix.stride + column;
  return part;
}

// Rows and columns of c.
Product part_of(const Product& c, Range rows, Range columns) {
  Product part = c;
  part.data += rows.begin * c.stride + columns.begin;
  part.rows = rows.count();
  part.columns = columns.count();
  return part;
}

// As split_range, by whole panels of kRows rows: the rows left over in a part cost as much as a panel.
Range split_rows(int64_t rows, int64_t parts, int64_t part) {
  const Range panels = split_range(ceil_div(rows, kRows), parts, part);
  return {panels.begin * kRows, std::min(panels.end * kRows, rows)};
}

// How a product goes through b: by blocks of columns, and in each of depth.
struct BlocksOfB {
  explicit BlocksOfB(const Product& c)
      : product(c), across(ceil_div(c.columns, kBlockColumns)), deep(ceil_div(c.inner, kDepth)) {}
  int64_t count() const { return across * deep; }
  Range columns(int64_t block) const { return split_range(product.columns, across, block / deep); }
  Range depth(int64_t block) const { return split_range(product.inner, deep, block % deep); }
  Lines lines(const Matrix& b, int64_t block) const {
    const Matrix part = shifted(b, depth(block).begin, columns(block).begin);
    return {part.data, part.stride, b.transposed};
  }
  Product product;
  int64_t across, deep;
};

}  // namespace

void sgemm(const Product& c, const Matrix& a, const Matrix& b, const NextProduct& next) {
  if (c.inner == 0 && !c.accumulate) {
    for (int64_t row = 0; row < c.rows; ++row) std::fill_n(c.data + row * c.stride, c.columns, 0.0f);
  }
  const BlocksOfB blocks(c), blocks_of_next(next.c);
  const int64_t row_blocks = ceil_div(c.rows, kBlockRows);
  for (int64_t block = 0; block < blocks.count(); ++block) {
    const Range columns = blocks.columns(block), depth = blocks.depth(block);
    pack<kColumns>(blocks.lines(b, block), columns.count(), depth.count(), packed_b);
    const int64_t calls = ceil_div(c.rows, kRows) * ceil_div(columns.count(), kColumns);
    Ahead ahead;
    if (block + 1 < blocks.count()) {
      ahead = Ahead(blocks.lines(b, block + 1), blocks.columns(block + 1).count(),
                    blocks.depth(block + 1).count(), calls);
    } else if (blocks_of_next.count() > 0) {
      ahead = Ahead(blocks_of_next.lines(next.b, 0), blocks_of_next.columns(0).count(),
                    blocks_of_next.depth(0).count(), calls);
    }
    for (int64_t row_block = 0; row_block < row_blocks; ++row_block) {
      const Range rows = split_rows(c.rows, row_blocks, row_block);
      const BlockOfA a_block(shifted(a, rows.begin, depth.begin), rows.count(), depth.count());
      const Product part = part_of(c, rows, columns);
      if (c.accumulate || depth.begin > 0) {
        multiply_block<true>(part, a_block, ahead);
      } else {
        multiply_block<false>(part, a_block, ahead);
      }
    }
  }
}

void sgemm_in_place(const Product& c, const Matrix& a, const float* b, int64_t b_stride) {
  const auto multiply = [&](auto steps) {
    if (c.accumulate) {
      multiply_in_place<true>(c, a.data, steps, b, RowsOfB{b_stride});
    } else {
      multiply_in_place<false>(c, a.data, steps, b, RowsOfB{b_stride});
    }
  };
  if (a.transposed) {
    multiply(ColumnMajorSteps{a.stride});
  } else {
    multiply(RowMajorSteps{a.stride});
  }
}

Tiling tile_product(const Product& c, const Matrix& a, int64_t enough_tiles) {
  if (c.rows == 0 || c.columns == 0) return {};
  const int64_t kMaxRows = a.transposed ? 384 : 512;
  constexpr int64_t kMaxColumns = 256;
  constexpr int64_t kMinSide = 128;      // a smaller tile spends its time on copying operands
  constexpr int64_t kMinWork = 1 << 21;  // multiply-adds; some 25 microseconds
  int64_t tile_rows = std::min(c.rows, kMaxRows);
  int64_t tile_columns = std::min(c.columns, kMaxColumns);
  for (;;) {
    const Tiling tiling{ceil_div(c.rows, tile_rows), ceil_div(c.columns, tile_columns)};
    const int64_t longer = std::max(tile_rows, tile_columns);
    if (tiling.count() >= enough_tiles || longer < 2 * kMinSide ||
        tile_rows * tile_columns * std::max<int64_t>(1, c.inner) < 2 * kMinWork) {
      return tiling;
    }
    // b is copied once for each tile of rows, a for each tile of columns unless it is read where it is.
    const bool by_columns = tile_columns == longer || (!a.transposed && tile_columns >= 2 * kMinSide);
    int64_t& cut = by_columns ? tile_columns : tile_rows;
    cut = ceil_div(cut, 2);
  }
}

Tile tile_of(const Product& c, const Matrix& a, const Matrix& b, const Tiling& tiling, int64_t tile) {
  // Neighbouring tiles share their rows of a and go through b.
  const Range rows = split_rows(c.rows, tiling.row_tiles, tile / tiling.column_tiles);
  const Range columns = split_range(c.columns, tiling.column_tiles, tile % tiling.column_tiles);
  return {rows, part_of(c, rows, columns), shifted(a, rows.begin, 0), shifted(b, 0, columns.begin)};
}

}  // namespace biomoe::cpu
