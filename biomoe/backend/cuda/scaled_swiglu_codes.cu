#include "biomoe/ops/scaled_swiglu_codes.h"

#include "biomoe/backend/cuda/device/compact_bf16.cuh"
#include "biomoe/backend/cuda/device/reduce.cuh"
#include "biomoe/backend/cuda/device/swiglu.cuh"
#include "biomoe/backend/cuda/device/tile.cuh"
#include "biomoe/backend/cuda/device/vector.cuh"
#include "biomoe/backend/cuda/launch.h"
#include "biomoe/ops/cuda_sizes.h"

namespace biomoe::cuda {
namespace {

constexpr int kThreads = kTileThreads;
constexpr int kRowsHeld = 4;
constexpr Fp8Format kFormat = Fp8Format::kE4M3;
constexpr int kInterleave = static_cast<int>(kGateUpInterleave);

// Of a tile that is kFeatures wide in act and twice that in gate_up each thread has the gates and the ups of
// eight features in the four rows of a quad, so that no thread lacks half of a pair.
template <int kFeatures>
struct PairTile {
  static constexpr int kVectors = kFeatures / 8;
  static constexpr int kThreadRows = kTileThreads / kVectors;
  static constexpr int kRows = kRowsHeld * kThreadRows;

  __device__ static int vector() { return static_cast<int>(threadIdx.x) % kVectors; }
  __device__ static int thread_row() { return static_cast<int>(threadIdx.x) / kVectors; }
  __device__ static int row() { return kRowsHeld * thread_row(); }
  // Of feature f of the tile; its up projection is kInterleave further.
  __device__ static int gate_column(int f) { return f + f / kInterleave * kInterleave; }
};
using RowTile = PairTile<128>;    // whose rows are blocks of act
using ColumnTile = PairTile<64>;  // whose columns are blocks of both, and rows blocks of dgate_up

// One past the last row that belongs to a group.
__device__ __forceinline__ int64_t rows_used(const int64_t* borders, int64_t groups, int64_t rows) {
  return min(borders[groups], rows);
}

// What both passes take, and the codes by row that they write: of act, and of dgate_up.
struct Pass {
  CompactPlanes kept;  // gate and up; without data forward keeps nothing
  const float* probs;
  const int64_t* offsets;
  int64_t groups, rows, width;  // of act
  ScaleRule rule;
  uint8_t* codes;
  float* row_scales;
  int64_t row_scales_stride;
};

struct Forward : Pass {
  const bf16* gate_up;
};

__global__ __launch_bounds__(kThreads, 4) void forward_kernel(Forward op, unsigned tiles) {
  using Tile = RowTile;
  const int64_t first_row = int64_t{blockIdx.x / tiles} * Tile::kRows;
  if (first_row >= rows_used(op.offsets, op.groups, op.rows)) return;
  const int64_t tile = blockIdx.x % tiles, row = first_row + Tile::row();
  const bf16* from = op.gate_up + row * 2 * op.width + tile * 256 + Tile::gate_column(8 * Tile::vector());
  Pack<bf16, 8> gate[kRowsHeld], up[kRowsHeld];
#pragma unroll
  for (int i = 0; i < kRowsHeld; ++i) {
    gate[i] = load<8>(from + i * 2 * op.width);
    up[i] = load<8>(from + i * 2 * op.width + kInterleave);
  }
  if (op.kept.data != nullptr) op.kept.store_four(row, tile * Tile::kVectors + Tile::vector(), gate, up);
  float amax[kRowsHeld];
#pragma unroll
  for (int i = 0; i < kRowsHeld; ++i) {
    const float prob = op.probs[row + i];
    float act[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) act[j] = scaled_swiglu(gate[i][j], up[i][j], prob);
    gate[i].set(act);
    amax[i] = largest_magnitude(gate[i]);
  }
  float* row_scales = op.row_scales + tile * op.row_scales_stride + row;
  const auto scales = scale_rows<kFormat, Tile::kVectors>(
      op.rule, amax, [&](int i, float, const BlockScale& scale) { row_scales[i] = scale.inverse; });
  uint8_t* to = op.codes + row * op.width + tile * 128 + 8 * Tile::vector();
#pragma unroll
  for (int i = 0; i < kRowsHeld; ++i) {
    *reinterpret_cast<uint2*>(to + i * op.width) = encode_eight<kFormat>(gate[i], scales.multiply(i));
  }
}

struct Backward : Pass {
  bf16* dact;
  uint8_t* column_codes;
  float* column_scales;
  uint8_t* act_column_codes;
  float* act_column_scales;
};

// What a thread holds of its tile: by pack, as ColumnScales numbers them.
enum HeldPack { kGate, kUp, kAct, kPacks };
using Held = Pack<bf16, 8>[kPacks][kRowsHeld];

// Turns gates, ups and gradients of act (in the place of act) into gradients and act. Returns the sum of the
// probability's gradients over the tile's columns, of the row of the quad that vector() % kRowsHeld tells.
__device__ __forceinline__ float turn_into_gradients(Held& held, const float* probs) {
  float dprob[kRowsHeld] = {};
#pragma unroll
  for (int i = 0; i < kRowsHeld; ++i) {
    const float prob = probs[i];
    float dgate[8], dup[8], act[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const ScaledSwigluGradient g =
          scaled_swiglu_gradient(held[kAct][i][j], held[kGate][i][j], held[kUp][i][j], prob);
      dgate[j] = g.dgate;
      dup[j] = g.dup;
      act[j] = g.act;
      dprob[i] += g.dprob;
    }
    held[kGate][i].set(dgate);
    held[kUp][i].set(dup);
    held[kAct][i].set(act);
  }
  SharedOutRows<ColumnTile::kVectors, kRowsHeld>::combine(dprob, [](float a, float b) { return a + b; });
  return dprob[0];
}

__device__ __forceinline__ void quantize_rows(const Backward& op, const Held& held, int64_t row,
                                              int64_t tile) {
  using Tile = ColumnTile;
  float amax[kRowsHeld];
#pragma unroll
  for (int i = 0; i < kRowsHeld; ++i) {
    amax[i] = fmaxf(largest_magnitude(held[kGate][i]), largest_magnitude(held[kUp][i]));
  }
  float* row_scales = op.row_scales + tile * op.row_scales_stride + row;
  const auto scales = scale_rows<kFormat, Tile::kVectors>(
      op.rule, amax, [&](int i, float, const BlockScale& scale) { row_scales[i] = scale.inverse; });
  uint8_t* to = op.codes + row * 2 * op.width + tile * 128 + Tile::gate_column(8 * Tile::vector());
#pragma unroll
  for (int i = 0; i < kRowsHeld; ++i) {
    const float multiply = scales.multiply(i);
    uint8_t* at = to + i * 2 * op.width;
    *reinterpret_cast<uint2*>(at) = encode_eight<kFormat>(held[kGate][i], multiply);
    *reinterpret_cast<uint2*>(at + kInterleave) = encode_eight<kFormat>(held[kUp][i], multiply);
  }
}

// A block's partial sums lie together in its tile of dact, which it has read: those of 32 rows of a tile are
// 128 bytes, and of neighbouring tiles they follow each other.
constexpr int kSumsRow = 32;

// Of tiles of 128 rows by 64 features. All loads of a thread are under way before the first is used.
__global__ __launch_bounds__(kThreads, 3) void backward_kernel(Backward op, unsigned tiles) {
  using Tile = ColumnTile;
  static_assert(Tile::kRows == 128);
  const int first_row = static_cast<int>(blockIdx.x / tiles * Tile::kRows);
  if (first_row >= rows_used(op.offsets, op.groups, op.rows)) return;
  const int tile = static_cast<int>(blockIdx.x % tiles);
  const int64_t row = first_row + Tile::row();
  const bf16* dact = op.dact + row * op.width + tile * 64 + 8 * Tile::vector();
  Held held;
#pragma unroll
  for (int i = 0; i < kRowsHeld; ++i) held[kAct][i] = load<8, Reuse::kStream>(dact + i * op.width);
  op.kept.load_four(row, int64_t{tile} * Tile::kVectors + Tile::vector(), held[kGate], held[kUp]);
  const float dprob = turn_into_gradients(held, op.probs + row);
  quantize_rows(op, held, row, tile);

  __shared__ ColumnScales<Tile, kPacks> column_scales;
  __shared__ TransposedTile<16> dgate_up;
  __shared__ TransposedTile<8> act;
  Pack<bf16, 8> amax[kPacks]{};
#pragma unroll
  for (int pack = 0; pack < kPacks; ++pack) {
#pragma unroll
    for (int i = 0; i < kRowsHeld; ++i) raise(amax[pack], held[pack][i]);
  }
  const int64_t row_block = first_row / 128;
  float* scales = op.column_scales + row_block * 2 * op.width + tile * 128;
  float* act_scales = op.act_column_scales + row_block * op.width + tile * 64;
  column_scales.find<kFormat>(op.rule, amax, [&](int c, float, const BlockScale& scale) {
    const int f = c % 64;
    float* to = c / 64 == kAct ? act_scales + f : scales + Tile::gate_column(f) + c / 64 * kInterleave;
    *to = scale.inverse;
  });
  // All of the block have read their gradients of act.
  if (Tile::vector() < kRowsHeld) {
    bf16* sums = op.dact + (first_row + Tile::row() / kSumsRow) * op.width + tile * 64;
    reinterpret_cast<float*>(sums)[Tile::row() % kSumsRow + Tile::vector()] = dprob;
  }
#pragma unroll
  for (int pack = 0; pack < kPacks; ++pack) {
    float multiply[8];
    column_scales.multiply(multiply, pack);
    uint2 codes[kRowsHeld];
#pragma unroll
    for (int i = 0; i < kRowsHeld; ++i) codes[i] = encode_eight<kFormat>(held[pack][i], multiply);
    if (pack == kAct) {
      act.put(Tile::vector(), Tile::thread_row(), codes);
    } else {
      dgate_up.put(2 * Tile::vector() + pack, Tile::thread_row(), codes);
    }
  }
  __syncthreads();
  dgate_up.write(128, 128, [&](int c) {
    const int pack = c / 8 % 2, f = c / 16 * 8 + c % 8;
    return op.column_codes + (int64_t{tile} * 128 + Tile::gate_column(f) + pack * kInterleave) * op.rows +
           first_row;
  });
  act.write(128, 64,
            [&](int f) { return op.act_column_codes + (int64_t{tile} * 64 + f) * op.rows + first_row; });
}

// A block sums the parts of kSumsRow rows.
__global__ void sum_dprobs_kernel(Backward op, float* dprobs) {
  const int64_t first_row = int64_t{blockIdx.x} * kSumsRow;
  if (first_row >= rows_used(op.offsets, op.groups, op.rows)) return;
  const bf16* parts = op.dact + (first_row / 128 * 128 + first_row % 128 / kSumsRow) * op.width;
  const float sum = column_sum(reinterpret_cast<const float*>(parts) + threadIdx.x, op.width / 64, kSumsRow);
  if (threadIdx.y == 0) dprobs[first_row + threadIdx.x] = sum;
}

// Of the arguments of either pass, for act of [rows, width].
template <typename Args>
Pass pass_of(const Args& args, int64_t rows, int64_t width, const TensorView& codes,
             const TensorView& row_scales) {
  return {.kept = {data_of<uint8_t>(args.kept_RC), rows, width},
          .probs = args.probs_R.f32(),
          .offsets = args.offsets_E1.i64(),
          .groups = args.offsets_E1.shape[0] - 1,
          .rows = rows,
          .width = width,
          .rule = args.rule,
          .codes = data_of<uint8_t>(codes),
          .row_scales = row_scales.f32(),
          .row_scales_stride = row_scales.shape[1]};
}

}  // namespace

void scaled_swiglu_codes_forward(Context& ctx, const ScaledSwigluCodesForwardArgs& args) {
  const int64_t rows = args.act_codes_RF.shape[0], width = args.act_codes_RF.shape[1];
  if (rows == 0 || width == 0) return;
  const Forward op{pass_of(args, rows, width, args.act_codes_RF, args.act_row_scales_BR),
                   data_of<const bf16>(args.gate_up_R2F)};
  const auto tiles = static_cast<unsigned>(width / 128);
  const auto blocks = static_cast<unsigned>(ceil_div(rows, RowTile::kRows));
  forward_kernel<<<tiles * blocks, kThreads, 0, stream_of(ctx)>>>(op, tiles);
  check_launch("scaled_swiglu_codes_forward");
}

void scaled_swiglu_codes_backward(Context& ctx, const ScaledSwigluCodesBackwardArgs& args) {
  const int64_t rows = args.dact_RF.shape[0], width = args.dact_RF.shape[1];
  if (rows == 0 || width == 0) return;
  const Backward op{pass_of(args, rows, width, args.dgate_up_codes_R2F, args.dgate_up_row_scales_BR),
                    data_of<bf16>(args.dact_RF),
                    data_of<uint8_t>(args.dgate_up_column_codes_2FR),
                    args.dgate_up_column_scales_B2F.f32(),
                    data_of<uint8_t>(args.act_column_codes_FR),
                    args.act_column_scales_BF.f32()};
  const auto tiles = static_cast<unsigned>(width / 64);
  const auto blocks = static_cast<unsigned>(ceil_div(rows, ColumnTile::kRows));
  backward_kernel<<<tiles * blocks, kThreads, 0, stream_of(ctx)>>>(op, tiles);
  const auto sums = static_cast<unsigned>(ceil_div(rows, kSumsRow));
  sum_dprobs_kernel<<<sums, dim3(kSumsRow, kSumRows), 0, stream_of(ctx)>>>(op, args.dprobs_R.f32());
  check_launch("scaled_swiglu_codes_backward");
}

}  // namespace biomoe::cuda
