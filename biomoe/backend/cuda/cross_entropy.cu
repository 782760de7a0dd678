#include "biomoe/ops/cross_entropy.h"

#include <cfloat>

#include "biomoe/backend/cuda/device/reduce.cuh"
#include "biomoe/backend/cuda/device/vector.cuh"
#include "biomoe/backend/cuda/launch.h"

namespace biomoe::cuda {
namespace {

struct RowsShape {
  int vocabulary;
  int64_t stride;
};

template <typename T>
struct RowsPointers {
  T* logits;
  const int32_t* targets;
  const float* weights;
  float* nll;
  const double* grad_scale;  // null: no gradient
};

// Sum of e^(x - reference) over some logits. The reference is finite unless a logit is +inf or NaN, so that a
// part of a row without a number other than -inf adds 0, while a bad logit makes the sum NaN.
struct ExpSum {
  float reference = -FLT_MAX;
  float sum = 0.0f;
};

template <typename T, int V>
__device__ __forceinline__ float largest_of(const Pack<T, V>& pack) {
  float largest = pack[0];
#pragma unroll
  for (int j = 1; j < V; ++j) largest = fmaxf(largest, pack[j]);
  return largest;
}

template <typename T, int V>
__device__ __forceinline__ void add_exp(const Pack<T, V>& pack, ExpSum& part) {
#pragma unroll
  for (int j = 0; j < V; ++j) part.sum += __expf(pack[j] - part.reference);
}

__device__ __forceinline__ void rebase(ExpSum& part, float reference) {
  part.sum *= __expf(part.reference - reference);
  part.reference = reference;
}

// All threads get the row's sum.
__device__ __forceinline__ ExpSum combine(ExpSum part) {
  __shared__ float largest[kWarp];
  const int warps = static_cast<int>(blockDim.x) / kWarp;
  const float of_warp = warp_max(part.reference);
  if (threadIdx.x % kWarp == 0) largest[threadIdx.x / kWarp] = of_warp;
  __syncthreads();
  float of_row = largest[0];
  for (int warp = 1; warp < warps; ++warp) of_row = fmaxf(of_row, largest[warp]);
  rebase(part, of_row);
  return {of_row, block_sum(part.sum)};
}

template <typename T, int V>
__device__ __forceinline__ void store_gradient(T* to, int i, const Pack<T, V>& pack, const ExpSum& row,
                                               float factor, int target, float target_gradient) {
  float values[V];
#pragma unroll
  for (int j = 0; j < V; ++j) {
    const float gradient = factor * __expf(pack[j] - row.reference);
    values[j] = i + j == target ? target_gradient : gradient;
  }
  store<Reuse::kStream>(to + i, values);
}

// A block a row. K > 0: a thread holds K vectors, which cover the row; 0: the row is read again for the
// gradient.
template <typename T, int V, int K>
__global__ __launch_bounds__(1024) void rows_kernel(RowsPointers<T> p, RowsShape shape) {
  const int64_t t = blockIdx.x;
  T* logits = p.logits + t * shape.stride;
  const int first = static_cast<int>(threadIdx.x) * V;
  const int step = static_cast<int>(blockDim.x) * V;
  const int target = p.targets[t];
  const float weight = p.weights[t];
  if (target < 0 || weight == 0.0f) {
    if (threadIdx.x == 0) p.nll[t] = 0.0f;
    const float zeros[V] = {};
    if (p.grad_scale) {
      for (int i = first; i < shape.vocabulary; i += step) store(logits + i, zeros);
    }
    return;
  }
  // Read before any thread overwrites it: the block meets in combine().
  const float target_logit = target < shape.vocabulary ? to_float(logits[target]) : NAN;
  ExpSum part;
  Pack<T, V> held[K > 0 ? K : 1];
  if constexpr (K > 0) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (first + k * step < shape.vocabulary) held[k] = load<V, Reuse::kStream>(logits + first + k * step);
    }
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (first + k * step < shape.vocabulary) part.reference = fmaxf(part.reference, largest_of(held[k]));
    }
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (first + k * step < shape.vocabulary) add_exp(held[k], part);
    }
  } else {
    for (int i = first; i < shape.vocabulary; i += step) {
      held[0] = load<V>(logits + i);
      rebase(part, fmaxf(part.reference, largest_of(held[0])));
      add_exp(held[0], part);
    }
  }
  const ExpSum row = combine(part);
  if (threadIdx.x == 0) p.nll[t] = logf(row.sum) - (target_logit - row.reference);
  if (!p.grad_scale) return;
  const auto scale = static_cast<float>(static_cast<double>(weight) * *p.grad_scale);
  // The target's p - 1 loses its digits where p is near 1; this difference loses fewer.
  const float inverse = 1.0f / row.sum;
  const float target_gradient = scale * ((__expf(target_logit - row.reference) - row.sum) * inverse);
  const float factor = scale * inverse;
  if constexpr (K > 0) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      const int i = first + k * step;
      if (i < shape.vocabulary)
        store_gradient<T, V>(logits, i, held[k], row, factor, target, target_gradient);
    }
  } else {
    for (int i = first; i < shape.vocabulary; i += step) {
      store_gradient<T, V>(logits, i, load<V>(logits + i), row, factor, target, target_gradient);
    }
  }
}

constexpr int kSumThreads = 1024;

__global__ __launch_bounds__(kSumThreads) void loss_sums_kernel(const float* nll, const float* weights,
                                                                int64_t tokens, double* sums) {
  double weighted = 0.0, plain = 0.0, count = 0.0;
#pragma unroll 4
  for (int64_t t = threadIdx.x; t < tokens; t += kSumThreads) {
    const float weight = weights[t];
    const float value = nll[t];
    if (weight == 0.0f) continue;
    weighted += static_cast<double>(weight) * static_cast<double>(value);
    plain += static_cast<double>(value);
    count += 1.0;
  }
  weighted = block_sum(weighted);
  plain = block_sum(plain);
  count = block_sum(count);
  if (threadIdx.x != 0) return;
  sums[0] += weighted;
  sums[1] += plain;
  sums[2] += count;
}

template <typename T>
void launch_rows(cudaStream_t stream, int64_t rows, const RowsPointers<T>& p, const RowsShape& shape,
                 bool vectors) {
  const auto blocks = static_cast<unsigned>(rows);
  const auto threads = [](int64_t items) {
    return static_cast<unsigned>(std::clamp<int64_t>(ceil_div(items, kWarp) * kWarp, kWarp, 1024));
  };
  const int64_t parts = shape.vocabulary / kVector;
  if (vectors && parts <= 4 * 1024) {
    rows_kernel<T, kVector, 4><<<blocks, threads(ceil_div(parts, 4)), 0, stream>>>(p, shape);
  } else if (vectors) {
    rows_kernel<T, kVector, 0><<<blocks, 1024, 0, stream>>>(p, shape);
  } else {
    rows_kernel<T, 1, 0><<<blocks, threads(ceil_div(shape.vocabulary, 4)), 0, stream>>>(p, shape);
  }
  check_launch("cross_entropy");
}

}  // namespace

void cross_entropy(Context& ctx, const CrossEntropyArgs& args) {
  const int64_t rows = args.logits_TV.shape[0];
  if (rows == 0) return;
  const RowsShape shape{static_cast<int>(args.logits_TV.shape[1]), args.logits_TV.row_stride};
  with_type(args.logits_TV.dtype, [&](auto type) {
    using T = decltype(type);
    const RowsPointers<T> p{data_of<T>(args.logits_TV), args.targets_T.i32(), args.weights_T.f32(),
                            args.nll_T.f32(), args.write_gradient ? args.grad_scale_1.f64() : nullptr};
    launch_rows(stream_of(ctx), rows, p, shape, vectors_fit({args.logits_TV}));
  });
}

void loss_sums(Context& ctx, const LossSumsArgs& args) {
  const int64_t tokens = args.nll_T.shape[0];
  if (tokens == 0) return;
  loss_sums_kernel<<<1, kSumThreads, 0, stream_of(ctx)>>>(args.nll_T.f32(), args.weights_T.f32(), tokens,
                                                          args.sums_3.f64());
  check_launch("loss_sums");
}

}  // namespace biomoe::cuda
