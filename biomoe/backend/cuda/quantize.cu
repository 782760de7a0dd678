#include "biomoe/ops/quantize.h"

#include "biomoe/backend/cuda/device/reduce.cuh"
#include "biomoe/backend/cuda/device/tile.cuh"
#include "biomoe/backend/cuda/device/vector.cuh"
#include "biomoe/backend/cuda/launch.h"
#include "biomoe/quant/mx_grid_scales.h"

namespace biomoe::cuda {
namespace {

constexpr int kThreads = kTileThreads;
constexpr int kWarps = kThreads / kWarp;

// What the kernels read and write; absent outputs are null.
template <typename T>
struct Operands {
  BlockGrid grid;
  ScaleRule rule;
  const T* x;
  int64_t x_stride;
  uint8_t* data;
  int64_t data_stride;
  T* dequantized;
  int64_t dequantized_stride;
  void* scales;
  float* row_scales;
  int64_t row_scales_stride;
  uint8_t* transposed;
  uint8_t* mx_scales;
  uint8_t* column_codes;
  float* column_scales;
  const float* given;
  float* amax;
};

// The largest magnitude so far. NaN is dropped: fmaxf returns its other argument.
__device__ __forceinline__ float raised(float amax, float value) {
  return fmaxf(amax, __uint_as_float(__float_as_uint(value) & 0x7fffffffu));
}

// By one thread of a block of elements. A block belongs to one thread, but for amax_NB the order of launches
// makes plain reads and writes enough.
template <typename T>
__device__ __forceinline__ void record(const Operands<T>& op, int64_t band, int64_t column, float amax,
                                       const BlockScale& scale) {
  const int64_t at = band * op.grid.block_columns() + column;
  if (op.amax) op.amax[at] = fmaxf(op.amax[at], amax);
  if (!op.scales) return;
  if (is_mx(op.rule)) {
    static_cast<uint8_t*>(op.scales)[at] = scale.e8m0;
  } else {
    static_cast<float*>(op.scales)[at] = scale.inverse;
  }
}

// Of a block of rows of one column.
template <typename T>
__device__ __forceinline__ void record_column(const Operands<T>& op, int64_t band, int64_t row,
                                              int64_t column, float amax, const BlockScale& scale) {
  if (op.mx_scales) op.mx_scales[MxGridScales(op.grid).offset(row, column)] = scale.e8m0;
  record(op, band, column, amax, scale);
}

// V consecutive elements of a row; returns their codes, of eight elements.
template <typename T, Fp8Format kFormat>
__device__ __forceinline__ uint2 write_eight(const Operands<T>& op, int64_t row, int64_t column,
                                             const float (&values)[8], const float (&multiply)[8],
                                             const float (&inverse)[8]) {
  const uint2 packed = encode_eight<kFormat>(values, multiply);
  if (op.data) *reinterpret_cast<uint2*>(op.data + row * op.data_stride + column) = packed;
  if (op.dequantized) {
    float rounded[8];
    decode_eight<kFormat>(packed, inverse, rounded);
    store(op.dequantized + row * op.dequantized_stride + column, rounded);
  }
  return packed;
}

template <typename T, Fp8Format kFormat>
__device__ __forceinline__ uint8_t write_one(const Operands<T>& op, int64_t row, int64_t column, float value,
                                             const BlockScale& scale) {
  const uint8_t code = fp8::encode(value * scale.multiply, kFormat);
  if (op.data) op.data[row * op.data_stride + column] = code;
  if (op.dequantized) {
    op.dequantized[row * op.dequantized_stride + column] =
        from_float<T>(fp8::decode(code, kFormat) * scale.inverse);
  }
  return code;
}

// V elements of one scale.
template <typename T, Fp8Format kFormat, int V>
__device__ __forceinline__ void write(const Operands<T>& op, int64_t row, int64_t column,
                                      const float (&values)[V], const BlockScale& scale) {
  if constexpr (V == 1) {
    write_one<T, kFormat>(op, row, column, values[0], scale);
  } else {
    float multiply[V], inverse[V];
#pragma unroll
    for (int j = 0; j < V; ++j) {
      multiply[j] = scale.multiply;
      inverse[j] = scale.inverse;
    }
    write_eight<T, kFormat>(op, row, column, values, multiply, inverse);
  }
}

// The same with element [row, column] as the first.
template <typename T>
__device__ __forceinline__ Operands<T> from_element(Operands<T> op, int64_t row, int64_t column) {
  if (op.data) op.data += row * op.data_stride + column;
  if (op.dequantized) op.dequantized += row * op.dequantized_stride + column;
  return op;
}

// Of block `block_column` of a row, by one thread.
template <typename T>
__device__ __forceinline__ void record_row(const Operands<T>& op, int64_t row, int64_t block_column,
                                           float amax, const BlockScale& scale) {
  if (op.row_scales) op.row_scales[block_column * op.row_scales_stride + row] = scale.inverse;
  if (op.mx_scales) op.mx_scales[MxGridScales(op.grid).offset(row, block_column)] = scale.e8m0;
  if (!op.scales && !op.amax) return;
  // Blocks of one row: band r + g (see BlockGrid::first_band).
  record(op, op.grid.grouped() ? row + op.grid.group_of_row(row) : row, block_column, amax, scale);
}

// Blocks of one row, 1 x kColumns, where vectors do not fit: a warp each.
template <typename T, Fp8Format kFormat, int kColumns>
__global__ __launch_bounds__(kThreads) void row_blocks_kernel(Operands<T> op) {
  constexpr int kPieces = kColumns / kWarp;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t block = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kWarp;
  const int64_t columns = op.grid.block_columns();
  const int64_t row = block / columns, block_column = block % columns;
  if (row >= op.grid.group_begin(op.grid.groups) || row >= op.grid.rows) return;
  float values[kPieces];
  float amax = 0.0f;
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    const int64_t column = block_column * kColumns + piece * kWarp + lane;
    values[piece] = column < op.grid.columns ? to_float(op.x[row * op.x_stride + column]) : 0.0f;
    amax = raised(amax, values[piece]);
  }
  amax = warp_max(amax);
  const BlockScale scale = block_scale(amax, kFormat, op.rule);
  if (lane == 0) record_row(op, row, block_column, amax, scale);
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    const int64_t column = block_column * kColumns + piece * kWarp + lane;
    if (column < op.grid.columns) write_one<T, kFormat>(op, row, column, values[piece], scale);
  }
}

// Where codes of group `group`'s row are in the transposed codes: [column] at column * rows of a group.
// Groups by offsets are parts of one matrix.
template <typename T>
__device__ __forceinline__ uint8_t* transposed_codes(const Operands<T>& op, int64_t group, int64_t row,
                                                     int64_t column, int64_t group_rows) {
  if (op.grid.offsets) return op.transposed + column * group_rows + row;
  return op.transposed + (group * op.grid.columns + column) * group_rows + row - op.grid.group_begin(group);
}

template <typename T>
__device__ __forceinline__ int64_t rows_of_a_group(const Operands<T>& op) {
  return op.grid.group_rows > 0 ? op.grid.group_rows : op.grid.rows;
}

// Blocks of one column, where vectors do not fit: a thread each, neighbouring threads on neighbouring
// columns. The second reading comes from the caches.
template <typename T, Fp8Format kFormat>
__global__ __launch_bounds__(kThreads) void column_blocks_kernel(Operands<T> op) {
  const int64_t column = int64_t{blockIdx.y} * kThreads + threadIdx.x;
  const BlockGrid::Band band = op.grid.band(blockIdx.x);
  if (column >= op.grid.columns || band.row_begin == band.row_end) return;
  float amax = 0.0f;
#pragma unroll 8
  for (int64_t r = band.row_begin; r < band.row_end; ++r) {
    amax = raised(amax, to_float(op.x[r * op.x_stride + column]));
  }
  const BlockScale scale = block_scale(amax, kFormat, op.rule);
  record_column(op, blockIdx.x, band.row_begin, column, amax, scale);
#pragma unroll 4
  for (int64_t r = band.row_begin; r < band.row_end; ++r) {
    const uint8_t code =
        write_one<T, kFormat>(op, r, column, to_float(op.x[r * op.x_stride + column]), scale);
    if (op.transposed) *transposed_codes(op, band.group, r, column, rows_of_a_group(op)) = code;
  }
}

// Blocks of many rows and columns, where vectors do not fit: a block of threads each.
template <typename T, Fp8Format kFormat>
__global__ __launch_bounds__(kThreads) void square_blocks_kernel(Operands<T> op) {
  const BlockGrid::Band band = op.grid.band(blockIdx.x);
  if (band.row_begin == band.row_end) return;
  const int64_t begin = blockIdx.y * op.grid.block.columns;
  const int64_t width = min(op.grid.block.columns, op.grid.columns - begin);
  const int64_t count = (band.row_end - band.row_begin) * op.grid.block.columns;
  float amax = 0.0f;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    const int64_t r = band.row_begin + i / op.grid.block.columns, c = i % op.grid.block.columns;
    if (c < width) amax = raised(amax, to_float(op.x[r * op.x_stride + begin + c]));
  }
  amax = block_max(amax);
  const BlockScale scale = block_scale(amax, kFormat, op.rule);
  if (threadIdx.x == 0) record(op, blockIdx.x, blockIdx.y, amax, scale);
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    const int64_t r = band.row_begin + i / op.grid.block.columns, c = i % op.grid.block.columns;
    if (c >= width) continue;
    const uint8_t code =
        write_one<T, kFormat>(op, r, begin + c, to_float(op.x[r * op.x_stride + begin + c]), scale);
    if (op.transposed) *transposed_codes(op, band.group, r, begin + c, rows_of_a_group(op)) = code;
  }
}

// Blocks of one column (kSquare: of 128 x 128) of which a block of threads has those of a tile.
template <typename T, Fp8Format kFormat, int kRows, bool kSquare>
__global__ __launch_bounds__(kThreads) void tile_blocks_kernel(Operands<T> op) {
  using Tile = TileShape<kRows>;
  const BlockGrid::Band band = op.grid.band(blockIdx.x);
  if (band.row_begin == band.row_end) return;
  const int64_t first_column = int64_t{blockIdx.y} * Tile::kColumns;
  const int64_t column = first_column + Tile::vector() * 8;
  const auto present = [&](int i) {
    return band.row_begin + Tile::row(i) < band.row_end && column < op.grid.columns;
  };
  Pack<T, 8> held[8], amax[1]{};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    held[i] = Pack<T, 8>{};
    if (present(i)) held[i] = load<8>(op.x + (band.row_begin + Tile::row(i)) * op.x_stride + column);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) raise(amax[0], held[i]);
  float multiply[8], inverse[8];
  if constexpr (kSquare) {
    const float largest = block_max(largest_magnitude(amax[0]));
    const BlockScale scale = block_scale(largest, kFormat, op.rule);
    if (threadIdx.x == 0) record(op, blockIdx.x, blockIdx.y, largest, scale);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      multiply[j] = scale.multiply;
      inverse[j] = scale.inverse;
    }
  } else {
    __shared__ ColumnScales<Tile> scales;
    scales.template find<kFormat>(op.rule, amax, [&](int c, float largest, const BlockScale& scale) {
      if (first_column + c >= op.grid.columns) return;
      record_column(op, blockIdx.x, band.row_begin, first_column + c, largest, scale);
    });
    scales.multiply(multiply);
    scales.inverse(inverse);
  }
  __shared__ std::conditional_t<kSquare, TransposedTile<>, char> transposed;
#pragma unroll
  for (int quad = 0; quad < 2; ++quad) {
    uint2 codes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = 4 * quad + i;
      float values[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) values[j] = held[at][j];
      codes[i] = make_uint2(0, 0);
      if (present(at)) {
        codes[i] =
            write_eight<T, kFormat>(op, band.row_begin + Tile::row(at), column, values, multiply, inverse);
      }
    }
    if constexpr (kSquare) {
      if (op.transposed) transposed.put(Tile::vector(), Tile::quad(4 * quad), codes);
    } else if (op.transposed && present(4 * quad)) {
      const int64_t row = band.row_begin + Tile::row(4 * quad), group_rows = rows_of_a_group(op);
      store_transposed(transposed_codes(op, band.group, row, column, group_rows), group_rows, codes);
    }
  }
  if constexpr (kSquare) {
    if (!op.transposed) return;
    __syncthreads();
    const int64_t group_rows = rows_of_a_group(op);
    uint8_t* to = transposed_codes(op, band.group, band.row_begin, first_column, group_rows);
    transposed.write(static_cast<int>(band.row_end - band.row_begin),
                     static_cast<int>(min(int64_t{128}, op.grid.columns - first_column)),
                     [&](int c) { return to + c * group_rows; });
  }
}

// Where a thread's part of a tile of 128 x 128 begins, and how many rows from there on there are.
struct TilePart {
  int64_t row, column;
  int rows;
  __device__ bool present(int i) const { return TileShape<128>::step(i) < rows; }
};

// Codes and scales of a tile's rows, in blocks of 1 x (8 kLanes): of kLanes neighbouring lanes.
template <typename T, Fp8Format kFormat, int kLanes>
__device__ __forceinline__ void quantize_rows(const Operands<T>& op, const TilePart& part,
                                              const Pack<T, 8> (&held)[8]) {
  using Tile = TileShape<128>;
  float amax[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) amax[i] = largest_magnitude(held[i]);
  // A block's first lanes may have columns where the others have none.
  const int rows = __shfl_sync(0xffffffffu, part.rows, 0, kLanes);
  const auto scales =
      scale_rows<kFormat, kLanes>(op.rule, amax, [&](int i, float largest, const BlockScale& scale) {
        const int row = Tile::step(i);
        if (row < rows) record_row(op, part.row + row, part.column / (8 * kLanes), largest, scale);
      });
  const Operands<T> at = from_element(op, part.row, part.column);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    BlockScale scale;
    scale.multiply = scales.multiply(i);
    if (op.dequantized) scale.inverse = scales.inverse(i);
    float values[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) values[j] = held[i][j];
    if (part.present(i)) write<T, kFormat>(at, Tile::step(i), 0, values, scale);
  }
}

// Codes, transposed, and scales of a tile's columns, each of which is a block; there are `rows` of it.
template <typename T, Fp8Format kFormat>
__device__ __forceinline__ void quantize_columns(const Operands<T>& op, int64_t first_row,
                                                 int64_t first_column, int rows,
                                                 const Pack<T, 8> (&held)[8]) {
  using Tile = TileShape<128>;
  __shared__ TransposedTile<> transposed;
  __shared__ ColumnScales<Tile> column_scales;
  Pack<T, 8> amax[1]{};
#pragma unroll
  for (int i = 0; i < 8; ++i) raise(amax[0], held[i]);
  float* scales = op.column_scales + first_row / 128 * op.grid.columns + first_column;
  column_scales.template find<kFormat>(op.rule, amax, [&](int c, float, const BlockScale& scale) {
    if (op.column_scales) scales[c] = scale.inverse;
  });
  if (!op.column_codes) return;
  float multiply[8];
  column_scales.multiply(multiply);
#pragma unroll
  for (int quad = 0; quad < 2; ++quad) {
    uint2 codes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) codes[i] = encode_eight<kFormat>(held[4 * quad + i], multiply);
    transposed.put(Tile::vector(), Tile::quad(4 * quad), codes);
  }
  __syncthreads();
  uint8_t* to = op.column_codes + first_column * op.grid.rows + first_row;
  transposed.write(rows, 128, [&](int c) { return to + c * op.grid.rows; });
}

// Of tiles of 128 x 128: blocks of one row, and the outputs by column, from one reading. All loads of a
// thread are under way before the first is used.
template <typename T, Fp8Format kFormat, int kLanes, bool kByRow, bool kByColumn>
__global__ __launch_bounds__(kThreads, sizeof(T) == 2 ? 4 : 2) void line_blocks_kernel(Operands<T> op,
                                                                                       unsigned tiles) {
  using Tile = TileShape<128>;
  const int64_t first_row = int64_t{blockIdx.x / tiles} * 128,
                first_column = int64_t{blockIdx.x % tiles} * 128;
  const int64_t end = min(op.grid.group_begin(op.grid.groups), op.grid.rows);
  if (first_row >= end) return;
  const int rows = static_cast<int>(min(int64_t{128}, end - first_row));
  TilePart part{first_row + Tile::row(0), first_column + Tile::vector() * 8, rows - Tile::row(0)};
  if (part.column >= op.grid.columns) part.rows = 0;
  const T* x = op.x + part.row * op.x_stride + part.column;
  Pack<T, 8> held[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    held[i] = Pack<T, 8>{};
    if (part.present(i)) held[i] = load<8>(x + Tile::step(i) * op.x_stride);
  }
  if constexpr (kByColumn) op.dequantized = nullptr;  // they do not go together
  if constexpr (kByRow) quantize_rows<T, kFormat, kLanes>(op, part, held);
  if constexpr (kByColumn) quantize_columns<T, kFormat>(op, first_row, first_column, rows, held);
}

// group_amax[g] = largest magnitude of the group; bits of non-negative floats are in the order of the floats.
template <typename T, int V>
__global__ __launch_bounds__(kThreads) void group_amax_kernel(Operands<T> op, unsigned* group_amax) {
  const int64_t row = blockIdx.x;
  if (row >= op.grid.group_begin(op.grid.groups)) return;
  float amax = 0.0f;
  for (int64_t c = threadIdx.x * V; c < op.grid.columns; c += kThreads * V) {
    const Pack<T, V> pack = load<V>(op.x + row * op.x_stride + c);
#pragma unroll
    for (int j = 0; j < V; ++j) amax = raised(amax, pack[j]);
  }
  amax = block_max(amax);
  if (threadIdx.x == 0 && amax > 0.0f) {
    atomicMax(group_amax + op.grid.group_of_row(row), __float_as_uint(amax));
  }
}

template <typename T, Fp8Format kFormat, int V>
__global__ __launch_bounds__(kThreads) void group_kernel(Operands<T> op, const unsigned* group_amax) {
  const int64_t row = blockIdx.x;
  if (row >= op.grid.group_begin(op.grid.groups)) return;
  const int64_t group = op.grid.group_of_row(row);
  const float amax = __uint_as_float(group_amax[group]);
  const BlockScale scale =
      op.rule == ScaleRule::kGiven ? given_block_scale(op.given[group]) : block_scale(amax, kFormat, op.rule);
  if (threadIdx.x == 0 && row == op.grid.group_begin(group)) record(op, group, 0, amax, scale);
  for (int64_t c = threadIdx.x * V; c < op.grid.columns; c += kThreads * V) {
    const Pack<T, V> pack = load<V>(op.x + row * op.x_stride + c);
    float values[V];
#pragma unroll
    for (int j = 0; j < V; ++j) values[j] = pack[j];
    write<T, kFormat, V>(op, row, c, values, scale);
  }
}

__global__ void delayed_scales_kernel(float* amax_HN, float* scales, const uint8_t* formats, int64_t steps,
                                      int64_t tensors, int margin, bool most_recent, bool power_of_two) {
  const int64_t n = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (n >= tensors) return;
  float* history = amax_HN + n;
  const float newest = history[0];
  float amax = newest;
  for (int64_t h = 1; h < steps; ++h) {
    const float value = history[h * tensors];
    if (!most_recent) amax = fmaxf(amax, value);
    history[(h - 1) * tensors] = value;
  }
  history[(steps - 1) * tensors] = newest;
  history[0] = 0.0f;
  scales[n] = delayed_scale(amax, scales[n], static_cast<Fp8Format>(formats[n]), margin, power_of_two);
}

template <typename Body>
void with_format(Fp8Format format, const Body& body) {
  if (format == Fp8Format::kE4M3) {
    body(std::integral_constant<Fp8Format, Fp8Format::kE4M3>{});
  } else {
    body(std::integral_constant<Fp8Format, Fp8Format::kE5M2>{});
  }
}

template <typename T>
Operands<T> operands_of(const QuantizeArgs& args, const BlockGrid& grid) {
  return {.grid = grid,
          .rule = args.rule,
          .x = data_of<const T>(args.x_RC),
          .x_stride = args.x_RC.row_stride,
          .data = data_of<uint8_t>(args.data_RC),
          .data_stride = args.data_RC.row_stride,
          .dequantized = data_of<T>(args.dequantized_RC),
          .dequantized_stride = args.dequantized_RC.row_stride,
          .scales = args.scales_NB.data,
          .row_scales = args.row_scales_BR.f32(),
          .row_scales_stride = args.row_scales_BR.row_stride,
          .transposed = data_of<uint8_t>(args.transposed_CR),
          .mx_scales = data_of<uint8_t>(args.mx_scales_S),
          .column_codes = data_of<uint8_t>(args.column_codes_CR),
          .column_scales = args.column_scales_BC.f32(),
          .given = data_of<const float>(args.given_scales_N),
          .amax = data_of<float>(args.amax_NB)};
}

template <typename T, Fp8Format kFormat, int kColumns>
void launch_rows(cudaStream_t stream, const Operands<T>& op, bool vectors) {
  if (!vectors) {
    const auto ctas = static_cast<unsigned>(ceil_div(op.grid.rows * op.grid.block_columns(), kWarps));
    row_blocks_kernel<T, kFormat, kColumns><<<ctas, kThreads, 0, stream>>>(op);
    return;
  }
  const auto tiles = static_cast<unsigned>(ceil_div(op.grid.columns, 128));
  const auto ctas = tiles * static_cast<unsigned>(ceil_div(op.grid.rows, 128));
  constexpr int kLanes = kColumns / kVector;
  if constexpr (kColumns == 128) {
    const bool by_row = op.data || op.row_scales;
    if ((op.column_codes || op.column_scales) && by_row) {
      line_blocks_kernel<T, kFormat, kLanes, true, true><<<ctas, kThreads, 0, stream>>>(op, tiles);
      return;
    }
    if (op.column_codes || op.column_scales) {
      line_blocks_kernel<T, kFormat, kLanes, false, true><<<ctas, kThreads, 0, stream>>>(op, tiles);
      return;
    }
  }
  line_blocks_kernel<T, kFormat, kLanes, true, false><<<ctas, kThreads, 0, stream>>>(op, tiles);
}

template <typename T, Fp8Format kFormat, int kRows, bool kSquare>
void launch_tiles(cudaStream_t stream, const Operands<T>& op) {
  const dim3 ctas(static_cast<unsigned>(op.grid.bands()),
                  static_cast<unsigned>(ceil_div(op.grid.columns, TileShape<kRows>::kColumns)));
  tile_blocks_kernel<T, kFormat, kRows, kSquare><<<ctas, kThreads, 0, stream>>>(op);
}

template <typename T, Fp8Format kFormat>
void launch_columns(cudaStream_t stream, const Operands<T>& op, bool vectors) {
  if (vectors && op.grid.block.rows == 128) return launch_tiles<T, kFormat, 128, false>(stream, op);
  if (vectors && op.grid.block.rows == 32) return launch_tiles<T, kFormat, 32, false>(stream, op);
  const dim3 ctas(static_cast<unsigned>(op.grid.bands()),
                  static_cast<unsigned>(ceil_div(op.grid.columns, kThreads)));
  column_blocks_kernel<T, kFormat><<<ctas, kThreads, 0, stream>>>(op);
}

template <typename T, Fp8Format kFormat>
void launch_squares(cudaStream_t stream, const Operands<T>& op, bool vectors) {
  if (vectors) return launch_tiles<T, kFormat, 128, true>(stream, op);
  const dim3 ctas(static_cast<unsigned>(op.grid.bands()), static_cast<unsigned>(op.grid.block_columns()));
  square_blocks_kernel<T, kFormat><<<ctas, kThreads, 0, stream>>>(op);
}

template <typename T, Fp8Format kFormat, int V>
void launch_groups(Context& ctx, const Operands<T>& op) {
  ArenaScope scope(scratch_of(ctx, "quantize"));
  const auto bytes = static_cast<size_t>(op.grid.groups) * sizeof(unsigned);
  auto* amax = static_cast<unsigned*>(ctx.scratch->allocate(bytes));
  check(cudaMemsetAsync(amax, 0, bytes, stream_of(ctx)), "quantize");
  const auto ctas = static_cast<unsigned>(op.grid.rows);
  if (op.rule != ScaleRule::kGiven || op.amax) {
    group_amax_kernel<T, V><<<ctas, kThreads, 0, stream_of(ctx)>>>(op, amax);
  }
  group_kernel<T, kFormat, V><<<ctas, kThreads, 0, stream_of(ctx)>>>(op, amax);
}

// Sixteen codes at a time.
bool transposed_fits(const QuantizeArgs& args) {
  constexpr int64_t kCodes = 16;
  return !args.transposed_CR || (args.transposed_CR.shape[1] % kCodes == 0 &&
                                 reinterpret_cast<uintptr_t>(args.transposed_CR.data) % kCodes == 0);
}

}  // namespace

void quantize(Context& ctx, const QuantizeArgs& args) {
  const BlockGrid grid = block_grid(args);
  if (args.mx_scales_S) {
    check(cudaMemsetAsync(args.mx_scales_S.data, 0, args.mx_scales_S.bytes(), stream_of(ctx)), "quantize");
  }
  if (grid.rows == 0 || grid.columns == 0 || grid.groups == 0) return;
  const bool data_fits = !args.data_RC || (args.data_RC.row_stride % kVector == 0 &&
                                           reinterpret_cast<uintptr_t>(args.data_RC.data) % kVector == 0);
  const bool fits = data_fits && vectors_fit({args.x_RC, args.dequantized_RC});
  with_type(args.x_RC.dtype, [&](auto type) {
    using T = decltype(type);
    with_format(args.format, [&](auto format) {
      constexpr Fp8Format kFormat = decltype(format)::value;
      const Operands<T> op = operands_of<T>(args, grid);
      if (grid.block.rows == 1) {
        grid.block.columns == 32 ? launch_rows<T, kFormat, 32>(stream_of(ctx), op, fits)
                                 : launch_rows<T, kFormat, 128>(stream_of(ctx), op, fits);
      } else if (grid.block.columns == 1) {
        launch_columns<T, kFormat>(stream_of(ctx), op, fits && transposed_fits(args));
      } else if (grid.block.rows > 1) {
        launch_squares<T, kFormat>(stream_of(ctx), op, fits && transposed_fits(args));
      } else {
        with_vector(fits, [&](auto v) { launch_groups<T, kFormat, decltype(v)::value>(ctx, op); });
      }
    });
  });
  check_launch("quantize");
}

void update_delayed_scales(Context& ctx, const UpdateDelayedScalesArgs& args) {
  const int64_t tensors = args.amax_HN.shape[1];
  if (tensors == 0) return;
  delayed_scales_kernel<<<static_cast<unsigned>(ceil_div(tensors, kThreads)), kThreads, 0, stream_of(ctx)>>>(
      args.amax_HN.f32(), args.scales_N.f32(), data_of<const uint8_t>(args.formats_N), args.amax_HN.shape[0],
      tensors, static_cast<int>(args.margin), args.most_recent, args.power_of_two);
  check_launch("update_delayed_scales");
}

}  // namespace biomoe::cuda
