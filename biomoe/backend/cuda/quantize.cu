#include "biomoe/ops/quantize.h"

#include "biomoe/backend/cuda/device/fp8.cuh"
#include "biomoe/backend/cuda/device/reduce.cuh"
#include "biomoe/backend/cuda/device/vector.cuh"
#include "biomoe/backend/cuda/launch.h"

namespace biomoe::cuda {
namespace {

constexpr int kThreads = 256;
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
  const float* given;
  float* amax;
};

__device__ __forceinline__ float magnitude(float value) {
  return __uint_as_float(__float_as_uint(value) & 0x7fffffffu);
}

// NaN is dropped: fmaxf returns its other argument.
__device__ __forceinline__ float raised(float amax, float value) {
  return fmaxf(amax, magnitude(value));
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

// V consecutive elements of a row; returns their codes, of eight elements.
template <typename T, Fp8Format kFormat>
__device__ __forceinline__ uint2 write_eight(const Operands<T>& op, int64_t row, int64_t column,
                                             const float (&values)[8], const float (&multiply)[8],
                                             const float (&inverse)[8]) {
  uint32_t codes[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float scaled[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) scaled[j] = values[4 * half + j] * multiply[4 * half + j];
    codes[half] = encode_four<kFormat>(scaled);
  }
  const uint2 packed = make_uint2(codes[0], codes[1]);
  if (op.data) *reinterpret_cast<uint2*>(op.data + row * op.data_stride + column) = packed;
  if (op.dequantized) {
    float rounded[8];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float decoded[4];
      decode_four<kFormat>(codes[half], decoded);
#pragma unroll
      for (int j = 0; j < 4; ++j) rounded[4 * half + j] = decoded[j] * inverse[4 * half + j];
    }
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

// Blocks of one row: 1 x kColumns, of kColumns / V neighbouring lanes where vectors fit, of a warp otherwise.
template <typename T, Fp8Format kFormat, int V, int kColumns>
__global__ __launch_bounds__(kThreads) void row_blocks_kernel(Operands<T> op) {
  constexpr int kLanes = V == 1 ? kWarp : kColumns / V;
  constexpr int kPieces = kColumns / (kLanes * V);
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t block = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kLanes;
  const int64_t columns = op.grid.block_columns();
  const int64_t row = block / columns, block_column = block % columns;
  const bool inside = row < op.grid.group_begin(op.grid.groups) && row < op.grid.rows;
  float values[kPieces][V];
  float amax = 0.0f;
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    const int64_t column = block_column * kColumns + (piece * kLanes + lane) * V;
    const bool present = inside && column < op.grid.columns;
#pragma unroll
    for (int j = 0; j < V; ++j) values[piece][j] = 0.0f;
    if (present) {
      const Pack<T, V> pack = load<V>(op.x + row * op.x_stride + column);
#pragma unroll
      for (int j = 0; j < V; ++j) values[piece][j] = pack[j];
    }
#pragma unroll
    for (int j = 0; j < V; ++j) amax = raised(amax, values[piece][j]);
  }
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
    amax = fmaxf(amax, __shfl_xor_sync(0xffffffffu, amax, step));
  }
  if (!inside) return;
  const BlockScale scale = block_scale(amax, kFormat, op.rule);
  if (lane == 0) {
    // Blocks of one row: band r + g (see BlockGrid::first_band).
    const int64_t at = op.grid.grouped() ? row + op.grid.group_of_row(row) : row;
    record(op, at, block_column, amax, scale);
    if (op.row_scales) op.row_scales[block_column * op.row_scales_stride + row] = scale.inverse;
  }
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    const int64_t column = block_column * kColumns + (piece * kLanes + lane) * V;
    if (column < op.grid.columns) write<T, kFormat, V>(op, row, column, values[piece], scale);
  }
}

// The largest of a block of threads, in all of them.
__device__ __forceinline__ float block_max(float value) {
  __shared__ float parts[kWarps];
  value = warp_max(value);
  if (threadIdx.x % kWarp == 0) parts[threadIdx.x / kWarp] = value;
  __syncthreads();
  float largest = parts[0];
#pragma unroll
  for (int warp = 1; warp < kWarps; ++warp) largest = fmaxf(largest, parts[warp]);
  __syncthreads();
  return largest;
}

// Where codes of group `group`'s row are in the transposed codes: [column] at column * rows of a group.
template <typename T>
__device__ __forceinline__ uint8_t* transposed_codes(const Operands<T>& op, int64_t group, int64_t row,
                                                     int64_t column, int64_t group_rows) {
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
  record(op, blockIdx.x, column, amax, scale);
#pragma unroll 4
  for (int64_t r = band.row_begin; r < band.row_end; ++r) {
    write_one<T, kFormat>(op, r, column, to_float(op.x[r * op.x_stride + column]), scale);
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

// A tile of a band in the registers of a block of threads, each of which holds eight columns of eight rows,
// in two fours. The tile is kRows high, the rows of a band.
template <int kRows>
struct TileShape {
  static constexpr int kColumns = kThreads * 64 / kRows;
  static constexpr int kVectors = kColumns / kVector;
  static constexpr int kThreadRows = kThreads / kVectors;  // threads above each other
  static constexpr int kHeld = kRows / kThreadRows;
  static_assert(kHeld == 8);

  __device__ static int vector() { return static_cast<int>(threadIdx.x) % kVectors; }
  __device__ static int thread_row() { return static_cast<int>(threadIdx.x) / kVectors; }
  // Of held row i, within the tile.
  __device__ static int quad(int i) { return thread_row() + i / 4 * kThreadRows; }
  __device__ static int row(int i) { return 4 * quad(i) + i % 4; }
};

// Scales of a tile's columns, from the amax of each thread's.
template <typename T, Fp8Format kFormat, class Tile>
__device__ __forceinline__ void scale_columns(const Operands<T>& op, int64_t band, int64_t first_column,
                                              const float (&amax)[8], float (&multiply)[8],
                                              float (&inverse)[8]) {
  __shared__ float parts[Tile::kThreadRows][Tile::kColumns];
  __shared__ float scales[2][Tile::kColumns];
#pragma unroll
  for (int j = 0; j < 8; ++j) parts[Tile::thread_row()][Tile::vector() * 8 + j] = amax[j];
  __syncthreads();
  for (int c = static_cast<int>(threadIdx.x); c < Tile::kColumns; c += kThreads) {
    float largest = parts[0][c];
#pragma unroll
    for (int row = 1; row < Tile::kThreadRows; ++row) largest = fmaxf(largest, parts[row][c]);
    const BlockScale scale = block_scale(largest, kFormat, op.rule);
    scales[0][c] = scale.multiply;
    scales[1][c] = scale.inverse;
    if (first_column + c < op.grid.columns) record(op, band, first_column + c, largest, scale);
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    multiply[j] = scales[0][Tile::vector() * 8 + j];
    inverse[j] = scales[1][Tile::vector() * 8 + j];
  }
}

// Codes of a tile of 128 x 128 on their way to being transposed: words of four rows of a column, of which
// those of a column lie in an order that leaves neither the writes nor the reads a conflict of banks.
class TransposedTile {
 public:
  // Codes of eight columns and the four rows of `quad`.
  __device__ static void put(uint32_t (*words)[32], int vector, int quad, const uint2 (&codes)[4]) {
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
      words[vector * 8 + j][quad ^ 2 * vector] = left[j];
      words[vector * 8 + 4 + j][quad ^ 2 * vector] = right[j];
    }
  }
  // Codes of rows [16 piece, 16 piece + 16) of a column.
  __device__ static uint4 get(const uint32_t (*words)[32], int column, int piece) {
    const int order = column / 8 * 2;
    const uint4 four = *reinterpret_cast<const uint4*>(&words[column][4 * (piece ^ order / 4)]);
    return order % 4 == 0 ? four : make_uint4(four.z, four.w, four.x, four.y);
  }
};

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
  Pack<T, 8> held[8];
  float amax[8] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    held[i] = Pack<T, 8>{};
    if (present(i)) held[i] = load<8>(op.x + (band.row_begin + Tile::row(i)) * op.x_stride + column);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) amax[j] = raised(amax[j], held[i][j]);
  }
  float multiply[8], inverse[8];
  if constexpr (kSquare) {
    float largest = amax[0];
#pragma unroll
    for (int j = 1; j < 8; ++j) largest = fmaxf(largest, amax[j]);
    largest = block_max(largest);
    const BlockScale scale = block_scale(largest, kFormat, op.rule);
    if (threadIdx.x == 0) record(op, blockIdx.x, blockIdx.y, largest, scale);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      multiply[j] = scale.multiply;
      inverse[j] = scale.inverse;
    }
  } else {
    scale_columns<T, kFormat, Tile>(op, blockIdx.x, first_column, amax, multiply, inverse);
  }
  __shared__ uint4 words_memory[kSquare ? 128 * 8 : 1];
  auto* words = reinterpret_cast<uint32_t(*)[32]>(words_memory);
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
    if (kSquare && op.transposed) TransposedTile::put(words, Tile::vector(), Tile::quad(4 * quad), codes);
  }
  if (!kSquare || !op.transposed) return;
  __syncthreads();
  const int64_t group_rows = rows_of_a_group(op);
  for (int i = static_cast<int>(threadIdx.x); i < 128 * 8; i += kThreads) {
    const int c = i / 8, piece = i % 8;
    const int64_t row = band.row_begin + 16 * piece;
    if (first_column + c >= op.grid.columns || row >= band.row_end) continue;
    *reinterpret_cast<uint4*>(transposed_codes(op, band.group, row, first_column + c, group_rows)) =
        TransposedTile::get(words, c, piece);
  }
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
          .given = data_of<const float>(args.given_scales_N),
          .amax = data_of<float>(args.amax_NB)};
}

template <typename T, Fp8Format kFormat, int V>
void launch_rows(cudaStream_t stream, const Operands<T>& op) {
  const int64_t blocks = op.grid.rows * op.grid.block_columns();
  const auto run = [&](auto columns) {
    constexpr int kColumns = decltype(columns)::value;
    constexpr int kLanes = V == 1 ? kWarp : kColumns / V;
    const auto ctas = static_cast<unsigned>(ceil_div(blocks * kLanes, kThreads));
    row_blocks_kernel<T, kFormat, V, kColumns><<<ctas, kThreads, 0, stream>>>(op);
  };
  op.grid.block.columns == 32 ? run(std::integral_constant<int, 32>{})
                              : run(std::integral_constant<int, 128>{});
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
        with_vector(fits, [&](auto v) { launch_rows<T, kFormat, decltype(v)::value>(stream_of(ctx), op); });
      } else if (grid.block.columns == 1) {
        launch_columns<T, kFormat>(stream_of(ctx), op, fits);
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
