#include "biomoe/ops/rope.h"

#include "biomoe/backend/cuda/device/vector.cuh"
#include "biomoe/backend/cuda/launch.h"

namespace biomoe::cuda {
namespace {

struct RopeShape {
  int64_t tokens, stride, positions;
  int heads, half;
  float sign;
};

// A thread rotates V pairs of one head.
template <typename T, int V>
__global__ void rope_kernel(T* x, const int32_t* positions, const float* cosines, const float* sines,
                            RopeShape shape) {
  const int64_t t = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (t >= shape.tokens) return;
  // The clamp only keeps reads inside the table: the data never holds such a position.
  const int64_t position = min(int64_t{positions[t]}, shape.positions - 1);
  const float* cos_row = cosines + position * shape.half;
  const float* sin_row = sines + position * shape.half;
  const int parts = shape.half / V;
  for (int item = static_cast<int>(threadIdx.x); item < shape.heads * parts;
       item += static_cast<int>(blockDim.x)) {
    const int head = item / parts;
    const int i = (item - head * parts) * V;
    T* first = x + t * shape.stride + int64_t{head} * 2 * shape.half + i;
    T* second = first + shape.half;
    const Pack<T, V> a = load<V>(first), b = load<V>(second);
    const Pack<float, V> cosine = load<V>(cos_row + i), sine = load<V>(sin_row + i);
    float rotated_a[V], rotated_b[V];
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const float s = shape.sign * sine[j];
      rotated_a[j] = a[j] * cosine[j] - b[j] * s;
      rotated_b[j] = b[j] * cosine[j] + a[j] * s;
    }
    store(first, rotated_a);
    store(second, rotated_b);
  }
}

}  // namespace

void rope(Context& ctx, const RopeArgs& args) {
  const int64_t tokens = args.x_TC.shape[0];
  const int64_t half = args.head_dim / 2;
  if (tokens == 0 || args.num_heads * half == 0) return;
  const RopeShape shape{tokens,
                        args.x_TC.row_stride,
                        args.cos_SK2.shape[0],
                        static_cast<int>(args.num_heads),
                        static_cast<int>(half),
                        args.inverse ? -1.0f : 1.0f};
  const TensorView heads = args.x_TC.columns(0, args.num_heads * args.head_dim);
  with_type(args.x_TC.dtype, [&](auto type) {
    using T = decltype(type);
    with_vector(half % kVector == 0 && vectors_fit({heads, args.cos_SK2, args.sin_SK2}), [&](auto vector) {
      constexpr int V = decltype(vector)::value;
      const Grid grid = row_grid(tokens, args.num_heads * half / V);
      rope_kernel<T, V><<<grid.blocks, grid.threads, 0, stream_of(ctx)>>>(
          data_of<T>(args.x_TC), args.positions_T.i32(), args.cos_SK2.f32(), args.sin_SK2.f32(), shape);
    });
  });
  check_launch("rope");
}

}  // namespace biomoe::cuda
