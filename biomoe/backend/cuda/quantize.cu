#include "biomoe/ops/quantize.h"

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

// V consecutive elements of a row.
template <typename T, Fp8Format kFormat, int V>
__device__ __forceinline__ void write(const Operands<T>& op, int64_t row, int64_t column,
                                      const float (&values)[V], const BlockScale& scale) {
  uint8_t codes[V];
#pragma unroll
  for (int j = 0; j < V; ++j) codes[j] = fp8::encode(values[j] * scale.multiply, kFormat);
  if (op.data) {
    uint8_t* to = op.data + row * op.data_stride + column;
    if constexpr (V == 8) {
      uint2 packed;
      packed.x = codes[0] | codes[1] << 8 | codes[2] << 16 | static_cast<unsigned>(codes[3]) << 24;
      packed.y = codes[4] | codes[5] << 8 | codes[6] << 16 | static_cast<unsigned>(codes[7]) << 24;
      *reinterpret_cast<uint2*>(to) = packed;
    } else {
#pragma unroll
      for (int j = 0; j < V; ++j) to[j] = codes[j];
    }
  }
  if (op.dequantized) {
    float rounded[V];
#pragma unroll
    for (int j = 0; j < V; ++j) rounded[j] = fp8::decode(codes[j], kFormat) * scale.inverse;
    store(op.dequantized + row * op.dequantized_stride + column, rounded);
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
  }
#pragma unroll
  for (int piece = 0; piece < kPieces; ++piece) {
    const int64_t column = block_column * kColumns + (piece * kLanes + lane) * V;
    if (column < op.grid.columns) write<T, kFormat, V>(op, row, column, values[piece], scale);
  }
}

// Blocks of one column: a thread each, neighbouring threads on neighbouring columns. The second reading comes
// from the caches.
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
    const float value[1] = {to_float(op.x[r * op.x_stride + column])};
    write<T, kFormat, 1>(op, r, column, value, scale);
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

// Blocks of many rows and columns: a block of threads each.
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
    const float value[1] = {to_float(op.x[r * op.x_stride + begin + c])};
    write<T, kFormat, 1>(op, r, begin + c, value, scale);
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
        const dim3 ctas(static_cast<unsigned>(grid.bands()),
                        static_cast<unsigned>(ceil_div(grid.columns, kThreads)));
        column_blocks_kernel<T, kFormat><<<ctas, kThreads, 0, stream_of(ctx)>>>(op);
      } else if (grid.block.rows > 1) {
        const dim3 ctas(static_cast<unsigned>(grid.bands()), static_cast<unsigned>(grid.block_columns()));
        square_blocks_kernel<T, kFormat><<<ctas, kThreads, 0, stream_of(ctx)>>>(op);
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
