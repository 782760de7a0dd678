#include "biomoe/ops/peer_dispatch.h"

#include "biomoe/backend/cuda/device/vector.cuh"
#include "biomoe/backend/cuda/launch.h"

namespace biomoe::cuda {
namespace {

constexpr int kPlanThreads = 256;
constexpr int kMostExperts = 4096;  // of a model; their first rows lie in shared memory

// A pointer for every rank; strides are the same on all.
template <typename T>
struct OfRanks {
  T* data[kMostPeers];
  int64_t stride;
};

template <typename T>
OfRanks<T> of_ranks(std::span<const TensorView> views) {
  OfRanks<T> all{};
  for (size_t p = 0; p < views.size(); ++p) all.data[p] = data_of<T>(views[p]);
  all.stride = views.empty() ? 0 : views[0].row_stride;
  return all;
}

// Every block finds the first row of each expert's rows from this rank, then moves its slots there.
__global__ __launch_bounds__(kPlanThreads) void peer_plan_kernel(
    const int32_t* expert_of_slot, const int64_t* begins, const int32_t* counts, int ranks, int experts,
    int rank, int row_alignment, int32_t* row_of_slot, int64_t slots, int64_t* offsets, int32_t* rows) {
  __shared__ int32_t first_row[kMostExperts];
  const int held = experts / ranks;
  // A thread a rank: its experts one after the other. There are few, and every block does the same.
  if (static_cast<int>(threadIdx.x) < ranks) {
    int32_t offset = 0;
    for (int i = 0; i < held; ++i) {
      const int e = static_cast<int>(threadIdx.x) * held + i;
      int32_t all = 0, before = 0;
      for (int p = 0; p < ranks; ++p) {
        const int32_t count = counts[p * experts + e];
        if (p < rank) before += count;
        all += count;
      }
      first_row[e] = offset + before;
      const bool here = static_cast<int>(threadIdx.x) == rank && blockIdx.x == 0;
      if (here) {
        offsets[i] = offset;
        rows[i] = all;
      }
      offset += (all + row_alignment - 1) / row_alignment * row_alignment;
      if (here) offsets[i + 1] = offset;
    }
  }
  __syncthreads();
  const int64_t slot = int64_t{blockIdx.x} * kPlanThreads + threadIdx.x;
  if (slot >= slots) return;
  const int e = min(max(expert_of_slot[slot], 0), experts - 1);
  row_of_slot[slot] += first_row[e] - static_cast<int32_t>(begins[e]);
}

template <typename T, int V>
__global__ void send_rows_kernel(const T* x, int64_t x_stride, const int32_t* experts,
                                 const int32_t* row_of_slot, OfRanks<T> y, int64_t slots, int width,
                                 int top_k, int held, const float* values, OfRanks<float> y_values) {
  const int64_t slot = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (slot >= slots) return;
  const int rank = experts[slot] / held;
  const int64_t row = row_of_slot[slot];
  if (threadIdx.x == 0 && values) y_values.data[rank][row] = values[slot];
  const T* from = x + slot / top_k * x_stride;
  T* to = y.data[rank] + row * y.stride;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x) * V; i < width; i += static_cast<int>(blockDim.x) * V) {
    store(to + i, load<V>(from + i));
  }
}

template <typename T, int V>
__global__ void fetch_rows_kernel(OfRanks<T> y, const int32_t* experts, const int32_t* row_of_slot, T* x,
                                  int64_t x_stride, int64_t tokens, int width, int top_k, int held,
                                  OfRanks<float> y_values, float* values) {
  const int64_t t = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (t >= tokens) return;
  const int32_t* rows = row_of_slot + t * top_k;
  const int32_t* expert = experts + t * top_k;
  if (values) {
    for (int j = static_cast<int>(threadIdx.x); j < top_k; j += static_cast<int>(blockDim.x))
      values[t * top_k + j] = y_values.data[expert[j] / held][rows[j]];
  }
  T* to = x + t * x_stride;
#pragma unroll 2
  for (int i = static_cast<int>(threadIdx.x) * V; i < width; i += static_cast<int>(blockDim.x) * V) {
    float sum[V] = {};
    for (int j = 0; j < top_k; ++j) {
      const Pack<T, V> next = load<V>(y.data[expert[j] / held] + int64_t{rows[j]} * y.stride + i);
#pragma unroll
      for (int v = 0; v < V; ++v) sum[v] = j == 0 ? next[v] : sum[v] + next[v];
    }
    store(to + i, sum);
  }
}

// A block an expert.
template <typename T, int V>
__global__ void zero_padding_kernel(T* x, int64_t stride, int width, float* values, const int64_t* offsets,
                                    const int32_t* rows) {
  const float zeros[V] = {};
  const int64_t end = offsets[blockIdx.x + 1];
  for (int64_t row = offsets[blockIdx.x] + rows[blockIdx.x] + threadIdx.y; row < end; row += blockDim.y) {
    for (int i = static_cast<int>(threadIdx.x) * V; i < width; i += static_cast<int>(blockDim.x) * V)
      store(x + row * stride + i, zeros);
    if (values && threadIdx.x == 0) values[row] = 0.0f;
  }
}

}  // namespace

void peer_plan(Context& ctx, const PeerPlanArgs& args) {
  const int64_t ranks = args.counts_PE.shape[0], experts = args.counts_PE.shape[1];
  const int64_t slots = args.experts_Tk.num_elements();
  BM_CHECK(experts <= kMostExperts, "peer_plan: {} experts; the GPU's kernel has at most {}", experts,
           kMostExperts);
  const auto blocks = static_cast<unsigned>(std::max<int64_t>(1, ceil_div(slots, kPlanThreads)));
  peer_plan_kernel<<<blocks, kPlanThreads, 0, stream_of(ctx)>>>(
      args.experts_Tk.i32(), args.begins_E1.i64(), args.counts_PE.i32(), static_cast<int>(ranks),
      static_cast<int>(experts), static_cast<int>(args.rank), static_cast<int>(args.row_alignment),
      args.row_of_slot_N.i32(), slots, args.offsets_E1.i64(), args.rows_E.i32());
  check_launch("peer_plan");
}

void send_rows(Context& ctx, const SendRowsArgs& args) {
  const int64_t slots = args.experts_Tk.num_elements(), width = args.x_TD.shape[1];
  if (slots == 0) return;
  with_type(args.x_TD.dtype, [&](auto type) {
    using T = decltype(type);
    with_vector(vectors_fit({args.x_TD, args.y_PRD[0]}), [&](auto vector) {
      constexpr int V = decltype(vector)::value;
      const Grid grid = row_grid(slots, ceil_div(width, V));
      send_rows_kernel<T, V><<<grid.blocks, grid.threads, 0, stream_of(ctx)>>>(
          data_of<T>(args.x_TD), args.x_TD.row_stride, args.experts_Tk.i32(), args.row_of_slot_N.i32(),
          of_ranks<T>(args.y_PRD), slots, static_cast<int>(width), static_cast<int>(args.experts_Tk.shape[1]),
          static_cast<int>(args.held_experts), args.values_N.f32(), of_ranks<float>(args.y_values_PR));
    });
  });
  check_launch("send_rows");
}

void fetch_rows(Context& ctx, const FetchRowsArgs& args) {
  const int64_t tokens = args.x_TD.shape[0], width = args.x_TD.shape[1];
  if (tokens == 0) return;
  with_type(args.x_TD.dtype, [&](auto type) {
    using T = decltype(type);
    with_vector(vectors_fit({args.x_TD, args.y_PRD[0]}), [&](auto vector) {
      constexpr int V = decltype(vector)::value;
      const Grid grid = row_grid(tokens, ceil_div(width, V));
      fetch_rows_kernel<T, V><<<grid.blocks, grid.threads, 0, stream_of(ctx)>>>(
          of_ranks<T>(args.y_PRD), args.experts_Tk.i32(), args.row_of_slot_N.i32(), data_of<T>(args.x_TD),
          args.x_TD.row_stride, tokens, static_cast<int>(width), static_cast<int>(args.experts_Tk.shape[1]),
          static_cast<int>(args.held_experts), of_ranks<float>(args.y_values_PR), args.values_N.f32());
    });
  });
  check_launch("fetch_rows");
}

void zero_padding(Context& ctx, const ZeroPaddingArgs& args) {
  const int64_t experts = args.rows_E.shape[0], width = args.x_RD.shape[1];
  if (experts == 0) return;
  with_type(args.x_RD.dtype, [&](auto type) {
    using T = decltype(type);
    with_vector(vectors_fit({args.x_RD}), [&](auto vector) {
      constexpr int V = decltype(vector)::value;
      const dim3 threads = row_grid(1, ceil_div(width, V)).threads;
      zero_padding_kernel<T, V><<<static_cast<unsigned>(experts), threads, 0, stream_of(ctx)>>>(
          data_of<T>(args.x_RD), args.x_RD.row_stride, static_cast<int>(width), args.values_R.f32(),
          args.offsets_E1.i64(), args.rows_E.i32());
    });
  });
  check_launch("zero_padding");
}

}  // namespace biomoe::cuda
