#include "biomoe/ops/embedding.h"

#include <bit>

#include "biomoe/backend/cuda/counting_sort.cuh"
#include "biomoe/backend/cuda/device/vector.cuh"
#include "biomoe/backend/cuda/launch.h"
#include "biomoe/ops/cuda_sizes.h"

namespace biomoe::cuda {
namespace {

// An id outside the vocabulary, which the data never holds, gives NaN rather than a read elsewhere.
template <typename T, typename W, int V>
__global__ void forward_kernel(const int32_t* tokens, const W* weight, T* y, int64_t y_stride, int64_t rows,
                               int width, int vocabulary) {
  const int64_t t = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (t >= rows) return;
  const int token = tokens[t];
  const bool known = token >= 0 && token < vocabulary;
  const W* from = weight + int64_t{known ? token : 0} * width;
#pragma unroll 2
  for (int i = static_cast<int>(threadIdx.x) * V; i < width; i += static_cast<int>(blockDim.x) * V) {
    const Pack<W, V> row = load<V>(from + i);
    float values[V];
#pragma unroll
    for (int j = 0; j < V; ++j) values[j] = known ? row[j] : NAN;
    store(y + t * y_stride + i, values);
  }
}

// One digit of the id of the token at place `i` of an order of the tokens.
struct TokenDigit {
  const int32_t* tokens;
  const int32_t* order;  // null: as they come
  int32_t last;
  int shift, mask;
  __device__ int operator()(int64_t i) const {
    const int32_t token = tokens[order ? order[i] : i];
    return (min(max(token, 0), last) >> shift) & mask;
  }
};

struct PlaceToken {
  const int32_t* from;  // null: as they come
  int32_t* to;
  __device__ void operator()(int64_t i, int32_t place) const {
    to[place] = from ? from[i] : static_cast<int32_t>(i);
  }
};

struct IgnoreBegins {
  __device__ void operator()(int, int32_t, int32_t) const {}
};

// Tokens in order of id, cut into pieces of `piece` tokens. A run is all tokens of one id.
struct Runs {
  const int32_t* tokens;
  const int32_t* order;
  int64_t count;
  int64_t piece;
  int32_t last;
  __device__ int32_t id(int64_t i) const { return min(max(tokens[order[i]], 0), last); }
  // Whether the run of item i goes on with item i + 1.
  __device__ bool goes_on(int64_t i) const { return i + 1 < count && id(i + 1) == id(i); }
};

template <typename G>
struct Dweight {
  G* data;
  int width;
  bool accumulate;

  template <int V>
  __device__ __forceinline__ void put(int32_t id, int i, float (&sum)[V]) const {
    G* to = data + int64_t{id} * width + i;
    if (accumulate) {
      const Pack<G, V> before = load<V>(to);
#pragma unroll
      for (int j = 0; j < V; ++j) sum[j] += before[j];
    }
    store(to, sum);
  }
};

constexpr int kColumnThreads = 128;

template <int V>
__device__ __forceinline__ int column_of_thread() {
  return static_cast<int>(blockIdx.y * kColumnThreads + threadIdx.x) * V;
}

// Block (p, c) sums the runs of piece p for its columns, in order. A run inside the piece is done; the part
// of one that began before goes to partials[2 p], the part of one that goes on after to partials[2 p + 1].
template <typename T, typename G, int V>
__global__ __launch_bounds__(kColumnThreads) void piece_kernel(Runs runs, const T* dy, int64_t dy_stride,
                                                               Dweight<G> dweight, float* partials) {
  const int i = column_of_thread<V>();
  if (i >= dweight.width) return;
  const int64_t begin = blockIdx.x * runs.piece;
  const int64_t end = min(runs.count, begin + runs.piece);
  bool from_before = begin > 0 && runs.goes_on(begin - 1);
  float sum[V] = {};
#pragma unroll 4
  for (int64_t at = begin; at < end; ++at) {
    const Pack<T, V> row = load<V>(dy + int64_t{runs.order[at]} * dy_stride + i);
#pragma unroll
    for (int j = 0; j < V; ++j) sum[j] += row[j];
    const bool goes_on = runs.goes_on(at);
    if (goes_on && at + 1 < end) continue;
    if (from_before) {
      store(partials + int64_t{blockIdx.x} * 2 * dweight.width + i, sum);
    } else if (goes_on) {
      store(partials + (int64_t{blockIdx.x} * 2 + 1) * dweight.width + i, sum);
    } else {
      dweight.put(runs.id(at), i, sum);
    }
    from_before = false;
#pragma unroll
    for (int j = 0; j < V; ++j) sum[j] = 0.0f;
  }
}

// Block (p, c) finishes the run that begins in piece p and goes on after it, if there is one.
template <typename G, int V>
__global__ __launch_bounds__(kColumnThreads) void crossing_kernel(Runs runs, Dweight<G> dweight,
                                                                  const float* partials) {
  const int i = column_of_thread<V>();
  const int64_t begin = blockIdx.x * runs.piece;
  const int64_t end = min(runs.count, begin + runs.piece);
  if (i >= dweight.width || !runs.goes_on(end - 1)) return;
  const int32_t id = runs.id(end - 1);
  if (runs.id(begin) == id && begin > 0 && runs.id(begin - 1) == id) return;  // began before
  Pack<float, V> part = load<V>(partials + (int64_t{blockIdx.x} * 2 + 1) * dweight.width + i);
  float sum[V];
#pragma unroll
  for (int j = 0; j < V; ++j) sum[j] = part[j];
#pragma unroll 4
  for (int64_t piece = blockIdx.x + 1; piece < gridDim.x && runs.id(piece * runs.piece) == id; ++piece) {
    part = load<V>(partials + piece * 2 * dweight.width + i);
#pragma unroll
    for (int j = 0; j < V; ++j) sum[j] += part[j];
  }
  dweight.put(id, i, sum);
}

// Writes to `order` (of two buffers, returns which) the tokens in order of id, equal ids as they come.
const int32_t* sort_tokens(const Context& ctx, Arena& scratch, const EmbeddingBackwardArgs& args,
                           int32_t* const (&orders)[2]) {
  const int64_t count = args.tokens_T.shape[0];
  const int64_t vocabulary = args.dweight_VD.shape[0];
  const int digit = token_sort_digit_bits(vocabulary);
  const int32_t* from = nullptr;
  int next = 0;
  for (int shift = 0; shift < token_sort_bits(vocabulary); shift += digit) {
    const TokenDigit key{args.tokens_T.i32(), from, static_cast<int32_t>(vocabulary - 1), shift,
                         (1 << digit) - 1};
    counting_sort(ctx, scratch, count, 1 << digit, 1, key, PlaceToken{from, orders[next]}, IgnoreBegins{});
    from = orders[next];
    next = 1 - next;
  }
  return from;
}

template <typename T, typename G, int V>
void sum_runs(const Context& ctx, const EmbeddingBackwardArgs& args, const Runs& runs, float* partials) {
  const int64_t width = args.dweight_VD.shape[1];
  const dim3 grid(static_cast<unsigned>(ceil_div(runs.count, runs.piece)),
                  static_cast<unsigned>(ceil_div(width, int64_t{kColumnThreads} * V)));
  const Dweight<G> dweight{data_of<G>(args.dweight_VD), static_cast<int>(width), args.accumulate};
  piece_kernel<T, G, V><<<grid, kColumnThreads, 0, stream_of(ctx)>>>(
      runs, data_of<T>(args.dy_TD), args.dy_TD.row_stride, dweight, partials);
  check_launch("embedding_backward");
  crossing_kernel<G, V><<<grid, kColumnThreads, 0, stream_of(ctx)>>>(runs, dweight, partials);
  check_launch("embedding_backward");
}

}  // namespace

void embedding_forward(Context& ctx, const EmbeddingForwardArgs& args) {
  const int64_t rows = args.tokens_T.shape[0];
  const int64_t width = args.weight_VD.shape[1];
  if (rows == 0 || width == 0) return;
  with_type(args.y_TD.dtype, [&](auto type) {
    using T = decltype(type);
    with_type(args.weight_VD.dtype, [&](auto weight_type) {
      using W = decltype(weight_type);
      with_vector(vectors_fit({args.weight_VD, args.y_TD}), [&](auto vector) {
        constexpr int V = decltype(vector)::value;
        const Grid grid = row_grid(rows, ceil_div(width, V));
        forward_kernel<T, W, V><<<grid.blocks, grid.threads, 0, stream_of(ctx)>>>(
            args.tokens_T.i32(), data_of<W>(args.weight_VD), data_of<T>(args.y_TD), args.y_TD.row_stride,
            rows, static_cast<int>(width), static_cast<int>(args.weight_VD.shape[0]));
      });
    });
  });
  check_launch("embedding_forward");
}

void embedding_backward(Context& ctx, const EmbeddingBackwardArgs& args) {
  const int64_t count = args.tokens_T.shape[0];
  const int64_t width = args.dweight_VD.shape[1];
  // Rows of ids that do not occur; the others are overwritten.
  if (!args.accumulate && args.dweight_VD.bytes() > 0) {
    check(cudaMemsetAsync(args.dweight_VD.data, 0, args.dweight_VD.bytes(), stream_of(ctx)),
          "embedding_backward");
  }
  if (count == 0 || args.dweight_VD.bytes() == 0) return;
  Arena& scratch = scratch_of(ctx, "embedding_backward");
  const ArenaScope scope(scratch);
  const int64_t piece = embedding_piece_tokens(count);
  int32_t* const orders[2] = {scratch.tensor(DType::kI32, Shape{count}).i32(),
                              scratch.tensor(DType::kI32, Shape{count}).i32()};
  float* partials = scratch.tensor(DType::kF32, Shape{2 * ceil_div(count, piece), width}).f32();
  const int32_t* order = sort_tokens(ctx, scratch, args, orders);
  const Runs runs{args.tokens_T.i32(), order, count, piece,
                  static_cast<int32_t>(args.dweight_VD.shape[0] - 1)};
  with_type(args.dy_TD.dtype, [&](auto type) {
    using T = decltype(type);
    with_type(args.dweight_VD.dtype, [&](auto gradient_type) {
      using G = decltype(gradient_type);
      with_vector(vectors_fit({args.dy_TD, args.dweight_VD}),
                  [&](auto vector) { sum_runs<T, G, decltype(vector)::value>(ctx, args, runs, partials); });
    });
  });
}

}  // namespace biomoe::cuda
