#include "biomoe/ops/scaled_swiglu.h"

#include "biomoe/backend/cuda/device/reduce.cuh"
#include "biomoe/backend/cuda/device/swiglu.cuh"
#include "biomoe/backend/cuda/device/vector.cuh"
#include "biomoe/backend/cuda/launch.h"

namespace biomoe::cuda {
namespace {

constexpr int kBackwardThreads = 256;

struct SwigluShape {
  int64_t rows;
  const int64_t* rows_used;  // rows from here on are left alone; null: all are used
  int width;
  int interleave;  // 0: gate and up are halves
  int64_t act_stride, gate_up_stride, dgate_up_stride;
};

// Column of the gate of feature f; its up projection is up_distance further.
__device__ __forceinline__ int64_t gate_column(const SwigluShape& shape, int f) {
  if (shape.interleave == 0) return f;
  const int block = f / shape.interleave;
  return int64_t{f} + int64_t{block} * shape.interleave;
}

__device__ __forceinline__ int up_distance(const SwigluShape& shape) {
  return shape.interleave == 0 ? shape.width : shape.interleave;
}

template <typename T, int V>
__global__ void forward_kernel(const T* gate_up, const float* probs, T* act, SwigluShape shape) {
  const int64_t r = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (r >= shape.rows || (shape.rows_used && r >= *shape.rows_used)) return;
  const float prob = probs[r];
  const T* row = gate_up + r * shape.gate_up_stride;
#pragma unroll 2
  for (int f = static_cast<int>(threadIdx.x) * V; f < shape.width; f += static_cast<int>(blockDim.x) * V) {
    const T* at = row + gate_column(shape, f);
    const Pack<T, V> gate = load<V>(at), up = load<V>(at + up_distance(shape));
    float out[V];
#pragma unroll
    for (int j = 0; j < V; ++j) out[j] = scaled_swiglu(gate[j], up[j], prob);
    store(act + r * shape.act_stride + f, out);
  }
}

// A block a row, for the sum over its features. Gradients may replace gate_up: a thread reads what it writes
// first.
template <typename T, int V>
__global__ __launch_bounds__(kBackwardThreads) void backward_kernel(const T* dact, const T* gate_up,
                                                                    const float* probs, T* dgate_up,
                                                                    float* dprobs, SwigluShape shape) {
  const int64_t r = blockIdx.x;
  if (shape.rows_used && r >= *shape.rows_used) return;
  const float prob = probs[r];
  const int distance = up_distance(shape);
  float dprob = 0.0f;
  for (int f = static_cast<int>(threadIdx.x) * V; f < shape.width; f += kBackwardThreads * V) {
    const int64_t column = gate_column(shape, f);
    const T* at = gate_up + r * shape.gate_up_stride + column;
    const Pack<T, V> gate = load<V>(at), up = load<V>(at + distance);
    const Pack<T, V> grad = load<V, Reuse::kStream>(dact + r * shape.act_stride + f);
    float dgate[V], dup[V];
#pragma unroll
    for (int j = 0; j < V; ++j) {
      const ScaledSwigluGradient g = scaled_swiglu_gradient(grad[j], gate[j], up[j], prob);
      dgate[j] = g.dgate;
      dup[j] = g.dup;
      dprob += g.dprob;
    }
    T* to = dgate_up + r * shape.dgate_up_stride + column;
    store(to, dgate);
    store(to + distance, dup);
  }
  dprob = block_sum(dprob);
  if (threadIdx.x == 0) dprobs[r] = dprob;
}

const int64_t* rows_used(const TensorView& offsets_E1) {
  return offsets_E1 ? offsets_E1.i64() + (offsets_E1.shape[0] - 1) : nullptr;
}

}  // namespace

void scaled_swiglu_forward(Context& ctx, const ScaledSwigluForwardArgs& args) {
  const int64_t rows = args.act_RF.shape[0];
  const int64_t width = args.act_RF.shape[1];
  if (rows == 0 || width == 0) return;
  const SwigluShape shape{rows,
                          rows_used(args.offsets_E1),
                          static_cast<int>(width),
                          static_cast<int>(args.interleave),
                          args.act_RF.row_stride,
                          args.gate_up_R2F.row_stride,
                          0};
  const bool fits = args.interleave % kVector == 0 && vectors_fit({args.act_RF, args.gate_up_R2F});
  with_type(args.act_RF.dtype, [&](auto type) {
    using T = decltype(type);
    with_vector(fits, [&](auto vector) {
      constexpr int V = decltype(vector)::value;
      const Grid grid = row_grid(rows, ceil_div(width, V));
      forward_kernel<T, V><<<grid.blocks, grid.threads, 0, stream_of(ctx)>>>(
          data_of<T>(args.gate_up_R2F), args.probs_R.f32(), data_of<T>(args.act_RF), shape);
    });
  });
  check_launch("scaled_swiglu_forward");
}

void scaled_swiglu_backward(Context& ctx, const ScaledSwigluBackwardArgs& args) {
  const int64_t rows = args.dact_RF.shape[0];
  if (rows == 0) return;
  const SwigluShape shape{rows,
                          rows_used(args.offsets_E1),
                          static_cast<int>(args.dact_RF.shape[1]),
                          static_cast<int>(args.interleave),
                          args.dact_RF.row_stride,
                          args.gate_up_R2F.row_stride,
                          args.dgate_up_R2F.row_stride};
  const bool fits =
      args.interleave % kVector == 0 && vectors_fit({args.dact_RF, args.gate_up_R2F, args.dgate_up_R2F});
  with_type(args.dact_RF.dtype, [&](auto type) {
    using T = decltype(type);
    with_vector(fits, [&](auto vector) {
      constexpr int V = decltype(vector)::value;
      backward_kernel<T, V><<<static_cast<unsigned>(rows), kBackwardThreads, 0, stream_of(ctx)>>>(
          data_of<T>(args.dact_RF), data_of<T>(args.gate_up_R2F), args.probs_R.f32(),
          data_of<T>(args.dgate_up_R2F), args.dprobs_R.f32(), shape);
    });
  });
  check_launch("scaled_swiglu_backward");
}

}  // namespace biomoe::cuda
