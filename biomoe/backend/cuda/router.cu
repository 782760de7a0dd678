#include "biomoe/ops/router.h"

#include "biomoe/backend/cuda/device/reduce.cuh"
#include "biomoe/backend/cuda/device/vector.cuh"
#include "biomoe/backend/cuda/launch.h"
#include "biomoe/ops/cuda_sizes.h"

namespace biomoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kMaxExperts = 1024;

struct RouterShape {
  int64_t tokens, block_tokens;
  int experts, top_k;
  int64_t logits_stride, probs_stride;
};

struct RouterPointers {
  const float* logits;
  float* probs;
  int32_t* experts;
  float* weights;
  float* lse;
  unsigned long long* counts;
  double* partials;  // [blocks, experts + 1]: sums of the probabilities, and of lse^2, over a block's tokens
};

// Grows with the value; NaN is below every number, and -0 equals 0.
__device__ __forceinline__ unsigned order_of(float value) {
  if (isnan(value)) return 0;
  const unsigned bits = __float_as_uint(value + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Grows with the value, and falls with the index where values are equal. 0 is below every key.
__device__ __forceinline__ unsigned long long key_of(float value, int expert) {
  return static_cast<unsigned long long>(order_of(value)) << 32 |
         (0xffffffffu - static_cast<unsigned>(expert));
}

__device__ __forceinline__ unsigned long long warp_largest(unsigned long long key) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const unsigned long long other = __shfl_xor_sync(0xffffffffu, key, step);
    key = other > key ? other : key;
  }
  return key;
}

// A warp a token; lane l has experts l, l + 32 and so on. Returns lse.
template <int R>
__device__ __forceinline__ float route(const RouterPointers& p, const RouterShape& shape, int64_t t, int lane,
                                       int* block_counts) {
  const float* logits = p.logits + t * shape.logits_stride;
  float probs[R];
  float largest = -INFINITY;
#pragma unroll
  for (int i = 0; i < R; ++i) {
    const int e = lane + i * kWarp;
    probs[i] = e < shape.experts ? logits[e] : -INFINITY;
    largest = fmaxf(largest, probs[i]);
  }
  largest = warp_max(largest);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < R; ++i) {
    // A NaN, +inf, or nothing but -inf makes the sum NaN, and with it the row.
    probs[i] = lane + i * kWarp < shape.experts ? expf(probs[i] - largest) : 0.0f;
    sum += probs[i];
  }
  sum = warp_sum(sum);
  const bool bad = isnan(sum);
  unsigned long long keys[R];
#pragma unroll
  for (int i = 0; i < R; ++i) {
    const int e = lane + i * kWarp;
    probs[i] /= sum;
    keys[i] = 0;
    if (e >= shape.experts) continue;
    p.probs[t * shape.probs_stride + e] = probs[i];
    // Of a row of NaN, the logits still tell which experts are numbers.
    keys[i] = key_of(bad ? logits[e] : probs[i], e);
  }
  float selected = 0.0f;
  unsigned long long below = ~0ull;
  float* weights = p.weights + t * shape.top_k;
  for (int j = 0; j < shape.top_k; ++j) {
    unsigned long long best = 0;
#pragma unroll
    for (int i = 0; i < R; ++i) best = keys[i] < below && keys[i] > best ? keys[i] : best;
    best = below = warp_largest(best);
    // A probability is not negative: its order without the top bit is its bits.
    const float prob = bad ? sum : __uint_as_float(static_cast<unsigned>(best >> 32) & 0x7fffffffu);
    selected += prob;
    if (lane != 0) continue;
    const int expert = static_cast<int>(0xffffffffu - static_cast<unsigned>(best));
    p.experts[t * shape.top_k + j] = expert;
    weights[j] = prob;
    atomicAdd(block_counts + expert, 1);
  }
  __syncwarp();
  for (int j = lane; j < shape.top_k; j += kWarp) weights[j] /= selected;
  const float lse = largest + logf(sum);
  if (lane == 0) p.lse[t] = lse;
  return lse;
}

// Sums the block's probabilities: threads stand as `columns` experts by kThreads / columns groups of tokens.
__device__ __forceinline__ void add_probs(const RouterPointers& p, const RouterShape& shape, int64_t begin,
                                          int64_t end, int columns) {
  __shared__ double parts[kThreads];
  const int column = static_cast<int>(threadIdx.x) % columns;
  const int group = static_cast<int>(threadIdx.x) / columns;
  const int groups = kThreads / columns;
  for (int base = 0; base < shape.experts; base += columns) {
    const int e = base + column;
    double sum = 0.0;
    if (e < shape.experts) {
      for (int64_t t = begin + group; t < end; t += groups) {
        sum += static_cast<double>(p.probs[t * shape.probs_stride + e]);
      }
    }
    parts[threadIdx.x] = sum;
    __syncthreads();
    if (group == 0 && e < shape.experts) {
      for (int other = 1; other < groups; ++other) sum += parts[other * columns + column];
      p.partials[int64_t{blockIdx.x} * (shape.experts + 1) + e] = sum;
    }
    __syncthreads();
  }
}

template <int R>
__global__ __launch_bounds__(kThreads) void forward_kernel(RouterPointers p, RouterShape shape, int columns) {
  __shared__ int counts[R * kWarp];
  __shared__ double squares[kWarps];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  for (int e = static_cast<int>(threadIdx.x); e < R * kWarp; e += kThreads) counts[e] = 0;
  __syncthreads();
  const int64_t begin = blockIdx.x * shape.block_tokens;
  const int64_t end = min(shape.tokens, begin + shape.block_tokens);
  double square_sum = 0.0;
  for (int64_t t = begin + warp; t < end; t += kWarps) {
    const auto lse = static_cast<double>(route<R>(p, shape, t, lane, counts));
    square_sum += lse * lse;
  }
  if (lane == 0) squares[warp] = square_sum;
  __syncthreads();
  for (int e = static_cast<int>(threadIdx.x); e < shape.experts; e += kThreads) {
    if (counts[e]) atomicAdd(p.counts + e, static_cast<unsigned long long>(counts[e]));
  }
  if (threadIdx.x == 0) {
    for (int other = 1; other < kWarps; ++other) square_sum += squares[other];
    p.partials[int64_t{blockIdx.x} * (shape.experts + 1) + shape.experts] = square_sum;
  }
  add_probs(p, shape, begin, end, columns);
}

struct AddStatistics {
  double* prob_sums;
  double* z_sum;
  int64_t experts;
  __device__ void operator()(int64_t column, double sum) const {
    *(column < experts ? prob_sums + column : z_sum) += sum;
  }
};

struct BackwardPointers {
  const float* probs;
  const int32_t* experts;
  const float* weights;
  const float* lse;
  const float* dweights;
  const float* balance;  // or null
};

// A warp a token. With c = sum_j weight_j dweight_j, the renormalised softmax gives weight_j (dweight_j - c)
// for a selected expert and 0 for the others: the sum over all experts cancels since the weights sum to 1.
// With top_k = 1 the weight is exactly 1 and the gradient exactly 0.
template <typename T>
__global__ __launch_bounds__(kThreads) void backward_kernel(BackwardPointers p, RouterShape shape,
                                                            double z_scale, T* dlogits,
                                                            int64_t dlogits_stride) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int64_t t = int64_t{blockIdx.x} * kWarps + static_cast<int>(threadIdx.x) / kWarp;
  if (t >= shape.tokens) return;
  const float* probs = p.probs + t * shape.probs_stride;
  const int32_t* experts = p.experts + t * shape.top_k;
  const float* weights = p.weights + t * shape.top_k;
  const float* dweights = p.dweights + t * shape.top_k;
  const auto z_slope = static_cast<float>(2.0 * z_scale * static_cast<double>(p.lse[t]));
  float mean = 0.0f;
  if (p.balance) {
    for (int e = lane; e < shape.experts; e += kWarp) mean += probs[e] * p.balance[e];
    mean = warp_sum(mean);
  }
  float weighted = 0.0f;
  for (int j = 0; j < shape.top_k; ++j) weighted += weights[j] * dweights[j];
  for (int e = lane; e < shape.experts; e += kWarp) {
    float gradient = probs[e] * (p.balance ? p.balance[e] - mean + z_slope : z_slope);
    for (int j = 0; j < shape.top_k; ++j) {
      if (experts[j] == e) gradient += weights[j] * (dweights[j] - weighted);
    }
    dlogits[t * dlogits_stride + e] = from_float<T>(gradient);
  }
}

struct BalancePointers {
  const int64_t* counts;
  const double* prob_sums;
  const double* z_sums;
  double* losses;
  float* balance;
};

// `together`: layers of one sum.
__global__ __launch_bounds__(kThreads) void balance_kernel(BalancePointers p, int64_t layers,
                                                           int64_t together, int experts, double tokens,
                                                           double coef) {
  const double routings = static_cast<double>(layers) * tokens;
  const double of_sum = static_cast<double>(together) * tokens;
  double loss = 0.0;
  for (int64_t i = threadIdx.x; i < layers / together * experts; i += kThreads) {
    const int64_t first = i / experts * together, e = i % experts;
    int64_t count = 0;
    double prob_sum = 0.0;
    for (int64_t layer = first; layer < first + together; ++layer) {
      count += p.counts[layer * experts + e];
      prob_sum += p.prob_sums[layer * experts + e];
    }
    const double share = routings > 0 ? static_cast<double>(count) / of_sum : 0.0;
    if (routings > 0) loss += share * (prob_sum / routings);
    const float gradient = routings > 0 ? static_cast<float>(coef * experts * share / routings) : 0.0f;
    for (int64_t layer = first; layer < first + together; ++layer) p.balance[layer * experts + e] = gradient;
  }
  loss = block_sum(loss);
  double z_sum = 0.0;
  for (int64_t layer = threadIdx.x; layer < layers; layer += kThreads) z_sum += p.z_sums[layer];
  z_sum = block_sum(z_sum);
  if (threadIdx.x != 0) return;
  p.losses[0] = loss * experts;
  p.losses[1] = routings > 0 ? z_sum / routings : 0.0;
}

RouterShape shape_of(const TensorView& rows_TE, const TensorView& experts_Tk) {
  return {rows_TE.shape[0],
          router_block_tokens(rows_TE.shape[0]),
          static_cast<int>(rows_TE.shape[1]),
          static_cast<int>(experts_Tk.shape[1]),
          rows_TE.row_stride,
          rows_TE.row_stride};
}

}  // namespace

void router_forward(Context& ctx, const RouterForwardArgs& args) {
  RouterShape shape = shape_of(args.logits_TE, args.experts_Tk);
  shape.probs_stride = args.probs_TE.row_stride;
  if (shape.tokens == 0) return;
  BM_CHECK(shape.experts <= kMaxExperts, "router_forward: {} experts; the GPU's kernel has at most {}",
           shape.experts, kMaxExperts);
  const int64_t blocks = ceil_div(shape.tokens, shape.block_tokens);
  Arena& scratch = scratch_of(ctx, "router_forward");
  const ArenaScope scope(scratch);
  double* partials = scratch.tensor(DType::kF64, Shape{blocks, shape.experts + 1}).f64();
  const RouterPointers p{args.logits_TE.f32(),
                         args.probs_TE.f32(),
                         args.experts_Tk.i32(),
                         args.weights_Tk.f32(),
                         args.lse_T.f32(),
                         reinterpret_cast<unsigned long long*>(args.counts_E.i64()),
                         partials};
  const int columns =
      std::min(kThreads, static_cast<int>(std::bit_ceil(static_cast<unsigned>(shape.experts))));
  const auto grid = static_cast<unsigned>(blocks);
  if (shape.experts <= kWarp) {
    forward_kernel<1><<<grid, kThreads, 0, stream_of(ctx)>>>(p, shape, columns);
  } else if (shape.experts <= 8 * kWarp) {
    forward_kernel<8><<<grid, kThreads, 0, stream_of(ctx)>>>(p, shape, columns);
  } else {
    forward_kernel<32><<<grid, kThreads, 0, stream_of(ctx)>>>(p, shape, columns);
  }
  check_launch("router_forward");
  column_sums<<<static_cast<unsigned>(ceil_div(shape.experts + 1, kSumColumns)), dim3(kSumColumns, kSumRows),
                0, stream_of(ctx)>>>(
      partials, blocks, int64_t{shape.experts} + 1,
      AddStatistics{args.prob_sums_E.f64(), args.z_sum_1.f64(), shape.experts});
  check_launch("router_forward");
}

void router_backward(Context& ctx, const RouterBackwardArgs& args) {
  const RouterShape shape = shape_of(args.probs_TE, args.experts_Tk);
  if (shape.tokens == 0) return;
  const BackwardPointers p{args.probs_TE.f32(), args.experts_Tk.i32(),  args.weights_Tk.f32(),
                           args.lse_T.f32(),    args.dweights_Tk.f32(), args.balance_E.f32()};
  with_type(args.dlogits_TE.dtype, [&](auto type) {
    using T = decltype(type);
    backward_kernel<T>
        <<<static_cast<unsigned>(ceil_div(shape.tokens, kWarps)), kThreads, 0, stream_of(ctx)>>>(
            p, shape, args.z_scale, data_of<T>(args.dlogits_TE), args.dlogits_TE.row_stride);
  });
  check_launch("router_backward");
}

void balance_loss(Context& ctx, const BalanceLossArgs& args) {
  const int64_t layers = args.counts_LE.shape[0];
  const BalancePointers p{args.counts_LE.i64(), args.prob_sums_LE.f64(), args.z_sums_L.f64(),
                          args.losses_2.f64(), args.balance_LE.f32()};
  balance_kernel<<<1, kThreads, 0, stream_of(ctx)>>>(
      p, layers, args.over == BalanceOver::kAllLayers ? layers : 1, static_cast<int>(args.counts_LE.shape[1]),
      static_cast<double>(args.tokens), args.balance_coef);
  check_launch("balance_loss");
}

}  // namespace biomoe::cuda
