#include "biomoe/ops/mx_weights.h"

#include "biomoe/backend/cuda/device/mx_weights.cuh"
#include "biomoe/backend/cuda/launch.h"

namespace biomoe::cuda {
namespace {

template <typename T>
__global__ __launch_bounds__(kTileThreads) void mx_weights_kernel(const T* w, MxWeightPointers<T> to) {
  const MxTilePart part(to.in);
  Pack<T, 8> held[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    held[i] = Pack<T, 8>{};
    if (part.present) held[i] = load<8>(w + part.at(i));
  }
  write_mx_tile<Reuse::kKeep>(to, part, [&](int i) { return held[i]; });
}

// A warp reads the words of 32 squares, and then goes through the rows that are to be written, a lane a
// column.
template <typename T>
__global__ __launch_bounds__(kTileThreads) void turn_kernel(const T* w, MxWeightPointers<T> of,
                                                            int64_t squares, bool by_column) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t first = (int64_t{blockIdx.x} * kTileThreads + threadIdx.x) / kWarp * kWarp;
  const uint32_t mine = first + lane < squares ? of.differ[first + lane] : 0;
  const int64_t across = of.in / 32;
  for (uint32_t some = __ballot_sync(0xffffffffu, mine != 0); some != 0; some &= some - 1) {
    const int from = __ffs(static_cast<int>(some)) - 1;
    const int64_t band = (first + from) / across, column = (first + from) % across * 32 + lane;
    BlockScale scale;
    if (by_column) scale = mx_block_scale(of.column_scales[band * of.in + column]);
    for (uint32_t rows = __shfl_sync(0xffffffffu, mine, from); rows != 0; rows &= rows - 1) {
      const int64_t at = (band * 32 + __ffs(static_cast<int>(rows)) - 1) * of.in + column;
      const float x = to_float(w[at]);
      if (!by_column) {
        // NaN is dropped: fmaxf returns its other argument.
        scale = block_scale(warp_max(fmaxf(0.0f, fabsf(x))), Fp8Format::kE4M3, of.rule);
      }
      const uint8_t code = fp8::encode(x * scale.multiply, Fp8Format::kE4M3);
      of.values[at] = from_float<T>(fp8::decode(code, Fp8Format::kE4M3) * scale.inverse);
    }
  }
}

}  // namespace

void write_mx_weights(Context& ctx, const WriteMxWeightsArgs& args) {
  const int64_t tiles = mx_tiles(args.to);
  if (tiles == 0) return;
  with_type(args.w_EOI.dtype, [&](auto type) {
    using T = decltype(type);
    mx_weights_kernel<T><<<static_cast<unsigned>(tiles), kTileThreads, 0, stream_of(ctx)>>>(
        data_of<const T>(args.w_EOI), mx_weight_pointers<T>(args.to));
  });
  check_launch("write_mx_weights");
}

void turn_mx_weights(Context& ctx, const TurnMxWeightsArgs& args) {
  const int64_t squares = args.of.differ_BS.num_elements();
  if (squares == 0) return;
  with_type(args.w_EOI.dtype, [&](auto type) {
    using T = decltype(type);
    turn_kernel<T>
        <<<static_cast<unsigned>(ceil_div(squares, kTileThreads)), kTileThreads, 0, stream_of(ctx)>>>(
            data_of<const T>(args.w_EOI), mx_weight_pointers<T>(args.of), squares, args.by_column);
  });
  check_launch("turn_mx_weights");
}

}  // namespace biomoe::cuda
