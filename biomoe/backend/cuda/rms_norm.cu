#include "biomoe/ops/rms_norm.h"

#include "biomoe/backend/cuda/device/reduce.cuh"
#include "biomoe/backend/cuda/device/vector.cuh"
#include "biomoe/backend/cuda/launch.h"
#include "biomoe/ops/cuda_sizes.h"

namespace biomoe::cuda {
namespace {

struct ForwardShape {
  int width;
  int64_t x_stride, residual_stride, sum_stride, y_stride;
  float eps;
};

template <typename T>
struct ForwardPointers {
  const T* x;
  const T* residual;  // or null
  const T* weight;
  T* sum;  // or null; may be x or residual
  T* y;
  float* rstd;
};

// The element as it is kept: the sum of two is rounded to T before anything is computed from it, so that the
// backward pass, which reads it back, sees the same numbers.
template <typename T, int V>
__device__ __forceinline__ Pack<T, V> load_sum(const ForwardPointers<T>& p, const ForwardShape& shape,
                                               int64_t t, int i) {
  Pack<T, V> x = load<V>(p.x + t * shape.x_stride + i);
  if (p.residual) {
    const Pack<T, V> residual = load<V>(p.residual + t * shape.residual_stride + i);
    float values[V];
#pragma unroll
    for (int j = 0; j < V; ++j) values[j] = x[j] + residual[j];
    x.set(values);
  }
  if (p.sum) store(p.sum + t * shape.sum_stride + i, x);
  return x;
}

template <typename T, int V>
__device__ __forceinline__ void store_scaled(const ForwardPointers<T>& p, const ForwardShape& shape,
                                             int64_t t, int i, const Pack<T, V>& sum, float rstd) {
  const Pack<T, V> weight = load<V>(p.weight + i);
  float values[V];
#pragma unroll
  for (int j = 0; j < V; ++j) values[j] = weight[j] * (sum[j] * rstd);
  store(p.y + t * shape.y_stride + i, values);
}

// A block a row. K > 0: a thread holds K vectors, which cover the row; 0: the row is read again for the
// output.
template <typename T, int V, int K>
__global__ void forward_kernel(ForwardPointers<T> p, ForwardShape shape) {
  const int64_t t = blockIdx.x;
  const int first = static_cast<int>(threadIdx.x) * V;
  const int step = static_cast<int>(blockDim.x) * V;
  float squares = 0.0f;
  Pack<T, V> held[K > 0 ? K : 1];
  if constexpr (K > 0) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (first + k * step >= shape.width) continue;
      held[k] = load_sum<T, V>(p, shape, t, first + k * step);
#pragma unroll
      for (int j = 0; j < V; ++j) squares += held[k][j] * held[k][j];
    }
  } else {
    for (int i = first; i < shape.width; i += step) {
      held[0] = load_sum<T, V>(p, shape, t, i);
      for (int j = 0; j < V; ++j) squares += held[0][j] * held[0][j];
    }
  }
  squares = block_sum(squares);
  const float rstd = 1.0f / sqrtf(squares / static_cast<float>(shape.width) + shape.eps);
  if (threadIdx.x == 0) p.rstd[t] = rstd;
  if constexpr (K > 0) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int i = first + k * step;
      if (i < shape.width) store_scaled<T, V>(p, shape, t, i, held[k], rstd);
    }
  } else {
    // Where there is a sum it has been written, maybe over x; each thread reads back its own.
    const T* row = p.sum ? p.sum + t * shape.sum_stride : p.x + t * shape.x_stride;
    for (int i = first; i < shape.width; i += step) {
      store_scaled<T, V>(p, shape, t, i, load<V>(row + i), rstd);
    }
  }
}

struct BackwardShape {
  int64_t tokens;
  int width;
  int64_t dy_stride, sum_stride, dresidual_stride, dx_stride;
};

template <typename T>
struct BackwardPointers {
  const T* dy;
  const T* sum;
  const T* weight;
  const float* rstd;
  const T* dresidual;  // or null; may be dx
  T* dx;
  float* partials;  // [gridDim.x, width]: dweight summed over the rows of a block
};

template <typename T, int V>
__device__ __forceinline__ void store_dx(const BackwardPointers<T>& p, const BackwardShape& shape, int64_t t,
                                         int i, const Pack<T, V>& dy, const Pack<T, V>& sum, float rstd,
                                         float scale) {
  const Pack<T, V> weight = load<V>(p.weight + i);
  float values[V];
#pragma unroll
  for (int j = 0; j < V; ++j) values[j] = rstd * (dy[j] * weight[j]) - scale * sum[j];
  if (p.dresidual) {
    const Pack<T, V> dresidual = load<V>(p.dresidual + t * shape.dresidual_stride + i);
#pragma unroll
    for (int j = 0; j < V; ++j) values[j] += dresidual[j];
  }
  store(p.dx + t * shape.dx_stride + i, values);
}

// Most threads of a block of the backward pass that holds K vectors a thread. With K = 2 in bf16 four blocks
// fit on a multiprocessor, which is what kRmsNormPartials counts on.
template <int K>
constexpr int backward_threads() {
  return K <= 2 ? 256 : 384;
}

// Block b takes rows b, b + gridDim.x and so on, and keeps its part of dweight in registers: with n = sum *
// rstd and g = dy * weight,  dx = rstd * (g - n * mean(g * n)),  dweight += dy * n.
template <typename T, int V, int K>
__global__ __launch_bounds__(backward_threads<K>(),
                             sizeof(T) * K <= 4 ? 4 : 1) void backward_kernel(BackwardPointers<T> p,
                                                                              BackwardShape shape) {
  const int first = static_cast<int>(threadIdx.x) * V;
  const int step = static_cast<int>(blockDim.x) * V;
  float dweight[K][V] = {};
  for (int64_t t = blockIdx.x; t < shape.tokens; t += gridDim.x) {
    const float rstd = p.rstd[t];
    Pack<T, V> dy[K], sum[K];
    float dot = 0.0f;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int i = first + k * step;
      if (i >= shape.width) continue;
      dy[k] = load<V>(p.dy + t * shape.dy_stride + i);
      sum[k] = load<V>(p.sum + t * shape.sum_stride + i);
      const Pack<T, V> weight = load<V>(p.weight + i);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        dot += dy[k][j] * weight[j] * sum[k][j];
        dweight[k][j] += dy[k][j] * (sum[k][j] * rstd);
      }
    }
    dot = block_sum(dot);
    const float scale = dot * rstd / static_cast<float>(shape.width) * rstd * rstd;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int i = first + k * step;
      if (i < shape.width) store_dx<T, V>(p, shape, t, i, dy[k], sum[k], rstd, scale);
    }
  }
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const int i = first + k * step;
    if (i < shape.width) store(p.partials + int64_t{blockIdx.x} * shape.width + i, dweight[k]);
  }
}

// The same for rows too wide for registers: dweight is summed in the block's row of partials.
template <typename T>
__global__ void backward_wide_kernel(BackwardPointers<T> p, BackwardShape shape) {
  const int first = static_cast<int>(threadIdx.x);
  const int step = static_cast<int>(blockDim.x);
  float* partial = p.partials + int64_t{blockIdx.x} * shape.width;
  for (int i = first; i < shape.width; i += step) partial[i] = 0.0f;
  for (int64_t t = blockIdx.x; t < shape.tokens; t += gridDim.x) {
    const float rstd = p.rstd[t];
    const T* dy = p.dy + t * shape.dy_stride;
    const T* sum = p.sum + t * shape.sum_stride;
    float dot = 0.0f;
    for (int i = first; i < shape.width; i += step) {
      const float grad = to_float(dy[i]);
      const float value = to_float(sum[i]);
      dot += grad * to_float(p.weight[i]) * value;
      partial[i] += grad * (value * rstd);
    }
    dot = block_sum(dot);
    const float scale = dot * rstd / static_cast<float>(shape.width) * rstd * rstd;
    for (int i = first; i < shape.width; i += step) {
      store_dx<T, 1>(p, shape, t, i, load<1>(dy + i), load<1>(sum + i), rstd, scale);
    }
  }
}

template <typename G>
struct StoreDweight {
  G* dweight;
  bool accumulate;
  __device__ void operator()(int64_t i, float sum) const {
    dweight[i] = from_float<G>(accumulate ? to_float(dweight[i]) + sum : sum);
  }
};

unsigned threads_for(int64_t items) {
  return static_cast<unsigned>(std::clamp<int64_t>(ceil_div(items, 32) * 32, 32, 1024));
}

template <typename T>
void launch_forward(cudaStream_t stream, int64_t tokens, const ForwardPointers<T>& p,
                    const ForwardShape& shape, bool vectors) {
  const auto blocks = static_cast<unsigned>(tokens);
  const int64_t parts = shape.width / kVector;
  if (vectors && parts <= 2 * 256) {
    forward_kernel<T, kVector, 2><<<blocks, threads_for(ceil_div(parts, 2)), 0, stream>>>(p, shape);
  } else if (vectors && parts <= 4 * 1024) {
    forward_kernel<T, kVector, 4><<<blocks, threads_for(ceil_div(parts, 4)), 0, stream>>>(p, shape);
  } else {
    forward_kernel<T, 1, 0><<<blocks, threads_for(ceil_div(shape.width, 4)), 0, stream>>>(p, shape);
  }
  check_launch("rms_norm_forward");
}

template <typename T>
void launch_backward(cudaStream_t stream, int64_t blocks, const BackwardPointers<T>& p,
                     const BackwardShape& shape, bool vectors) {
  const auto grid = static_cast<unsigned>(blocks);
  const int64_t parts = shape.width / kVector;
  if (vectors && parts <= 2 * backward_threads<2>()) {
    backward_kernel<T, kVector, 2><<<grid, threads_for(ceil_div(parts, 2)), 0, stream>>>(p, shape);
  } else if (vectors && parts <= 4 * backward_threads<4>()) {
    backward_kernel<T, kVector, 4><<<grid, threads_for(ceil_div(parts, 4)), 0, stream>>>(p, shape);
  } else {
    backward_wide_kernel<T><<<grid, threads_for(ceil_div(shape.width, 4)), 0, stream>>>(p, shape);
  }
  check_launch("rms_norm_backward");
}

}  // namespace

void rms_norm_forward(Context& ctx, const RmsNormForwardArgs& args) {
  const int64_t tokens = args.x_TD.shape[0];
  const int64_t width = args.x_TD.shape[1];
  if (tokens == 0) return;
  // Without a residual, a sum that is x itself needs no copy.
  const TensorView sum = !args.residual_TD && args.sum_TD.data == args.x_TD.data ? TensorView() : args.sum_TD;
  const ForwardShape shape{static_cast<int>(width), args.x_TD.row_stride, args.residual_TD.row_stride,
                           sum.row_stride,          args.y_TD.row_stride, static_cast<float>(args.eps)};
  const bool vectors = vectors_fit({args.x_TD, args.residual_TD, args.weight_D, sum, args.y_TD});
  with_type(args.x_TD.dtype, [&](auto type) {
    using T = decltype(type);
    const ForwardPointers<T> p{data_of<T>(args.x_TD), data_of<T>(args.residual_TD), data_of<T>(args.weight_D),
                               data_of<T>(sum),       data_of<T>(args.y_TD),        args.rstd_T.f32()};
    launch_forward(stream_of(ctx), tokens, p, shape, vectors);
  });
}

void rms_norm_backward(Context& ctx, const RmsNormBackwardArgs& args) {
  const int64_t tokens = args.dy_TD.shape[0];
  const int64_t width = args.dy_TD.shape[1];
  if (width == 0) return;
  const int64_t blocks = std::min(tokens, kRmsNormPartials);
  Arena& scratch = scratch_of(ctx, "rms_norm_backward");
  const ArenaScope scope(scratch);
  float* partials = scratch.tensor(DType::kF32, Shape{blocks, width}).f32();
  const BackwardShape shape{tokens,
                            static_cast<int>(width),
                            args.dy_TD.row_stride,
                            args.sum_TD.row_stride,
                            args.dresidual_TD.row_stride,
                            args.dx_TD.row_stride};
  const bool vectors = vectors_fit({args.dy_TD, args.sum_TD, args.weight_D, args.dresidual_TD, args.dx_TD});
  with_type(args.dy_TD.dtype, [&](auto type) {
    using T = decltype(type);
    const BackwardPointers<T> p{data_of<T>(args.dy_TD),
                                data_of<T>(args.sum_TD),
                                data_of<T>(args.weight_D),
                                args.rstd_T.f32(),
                                data_of<T>(args.dresidual_TD),
                                data_of<T>(args.dx_TD),
                                partials};
    if (tokens > 0) launch_backward(stream_of(ctx), blocks, p, shape, vectors);
  });
  with_type(args.dweight_D.dtype, [&](auto type) {
    using G = decltype(type);
    column_sums<<<static_cast<unsigned>(ceil_div(width, kSumColumns)), dim3(kSumColumns, kSumRows), 0,
                  stream_of(ctx)>>>(partials, blocks, width,
                                    StoreDweight<G>{data_of<G>(args.dweight_D), args.accumulate});
  });
  check_launch("rms_norm_backward");
}

}  // namespace biomoe::cuda
