#include "biomoe/ops/dispatch.h"

#include "biomoe/backend/cuda/counting_sort.cuh"
#include "biomoe/backend/cuda/device/vector.cuh"
#include "biomoe/backend/cuda/launch.h"

namespace biomoe::cuda {
namespace {

// The clamp only keeps accesses inside the tables: the router gives no other expert.
struct ExpertOfSlot {
  const int32_t* experts;
  int32_t last;
  __device__ int operator()(int64_t slot) const { return min(max(experts[slot], 0), last); }
};

struct PlaceSlot {
  int32_t* row_of_slot;
  int32_t* slot_of_row;
  __device__ void operator()(int64_t slot, int32_t row) const {
    row_of_slot[slot] = row;
    slot_of_row[row] = static_cast<int32_t>(slot);
  }
};

struct StoreOffset {
  int64_t* offsets;
  int32_t* rows;
  int experts;
  __device__ void operator()(int expert, int32_t begin, int32_t count) const {
    offsets[expert] = begin;
    if (expert < experts) rows[expert] = count;
  }
};

template <typename T, int V>
__global__ void permute_kernel(const T* x, int64_t x_stride, const int32_t* slot_of_row, T* y,
                               int64_t y_stride, int64_t rows, int width, int top_k, const float* values,
                               float* y_values) {
  const int64_t r = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (r >= rows) return;
  const int slot = slot_of_row[r];
  const int step = static_cast<int>(blockDim.x) * V;
  T* to = y + r * y_stride;
  if (threadIdx.x == 0 && values) y_values[r] = slot < 0 ? 0.0f : values[slot];
  if (slot < 0) {
    const float zeros[V] = {};
    for (int i = static_cast<int>(threadIdx.x) * V; i < width; i += step) store(to + i, zeros);
    return;
  }
  const T* from = x + int64_t{slot / top_k} * x_stride;
#pragma unroll 2
  for (int i = static_cast<int>(threadIdx.x) * V; i < width; i += step) store(to + i, load<V>(from + i));
}

template <typename T, int V>
__global__ void unpermute_kernel(const T* y, int64_t y_stride, const int32_t* row_of_slot, T* x,
                                 int64_t x_stride, int64_t tokens, int width, int top_k, bool accumulate) {
  const int64_t t = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (t >= tokens) return;
  const int32_t* rows = row_of_slot + t * top_k;
  T* to = x + t * x_stride;
#pragma unroll 2
  for (int i = static_cast<int>(threadIdx.x) * V; i < width; i += static_cast<int>(blockDim.x) * V) {
    const Pack<T, V> first = load<V, Reuse::kStream>(y + int64_t{rows[0]} * y_stride + i);
    float sum[V];
    if (accumulate) {
      const Pack<T, V> before = load<V>(to + i);
#pragma unroll
      for (int j = 0; j < V; ++j) sum[j] = before[j] + first[j];
    } else {
#pragma unroll
      for (int j = 0; j < V; ++j) sum[j] = first[j];
    }
    for (int slot = 1; slot < top_k; ++slot) {
      const Pack<T, V> next = load<V, Reuse::kStream>(y + int64_t{rows[slot]} * y_stride + i);
#pragma unroll
      for (int j = 0; j < V; ++j) sum[j] += next[j];
    }
    store(to + i, sum);
  }
}

__global__ void gather_values_kernel(const float* y_values, const int32_t* row_of_slot, float* values,
                                     int64_t slots) {
  const int64_t slot = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (slot < slots) values[slot] = y_values[row_of_slot[slot]];
}

}  // namespace

void dispatch_plan(Context& ctx, const DispatchPlanArgs& args) {
  const int64_t slots = args.experts_Tk.num_elements();
  const int64_t experts = args.offsets_E1.shape[0] - 1;
  BM_CHECK(experts <= kMaxSortBins, "dispatch_plan: {} experts; the GPU's kernel has at most {}", experts,
           kMaxSortBins);
  if (args.slot_of_row_R.bytes() > 0) {
    check(cudaMemsetAsync(args.slot_of_row_R.data, 0xff, args.slot_of_row_R.bytes(), stream_of(ctx)),
          "dispatch_plan");
  }
  counting_sort(ctx, scratch_of(ctx, "dispatch_plan"), slots, static_cast<int>(experts),
                static_cast<int32_t>(args.row_alignment),
                ExpertOfSlot{args.experts_Tk.i32(), static_cast<int32_t>(experts - 1)},
                PlaceSlot{args.row_of_slot_N.i32(), args.slot_of_row_R.i32()},
                StoreOffset{args.offsets_E1.i64(), args.rows_E.i32(), static_cast<int>(experts)});
}

void permute(Context& ctx, const PermuteArgs& args) {
  const int64_t rows = args.y_RD.shape[0];
  const int64_t width = args.x_TD.shape[1];
  if (rows == 0) return;
  with_type(args.x_TD.dtype, [&](auto type) {
    using T = decltype(type);
    with_vector(vectors_fit({args.x_TD, args.y_RD}), [&](auto vector) {
      constexpr int V = decltype(vector)::value;
      const Grid grid = row_grid(rows, ceil_div(width, V));
      permute_kernel<T, V><<<grid.blocks, grid.threads, 0, stream_of(ctx)>>>(
          data_of<T>(args.x_TD), args.x_TD.row_stride, args.slot_of_row_R.i32(), data_of<T>(args.y_RD),
          args.y_RD.row_stride, rows, static_cast<int>(width), static_cast<int>(args.top_k),
          args.values_N.f32(), args.y_values_R.f32());
    });
  });
  check_launch("permute");
}

void unpermute(Context& ctx, const UnpermuteArgs& args) {
  const int64_t tokens = args.x_TD.shape[0];
  const int64_t width = args.x_TD.shape[1];
  if (tokens == 0) return;
  with_type(args.x_TD.dtype, [&](auto type) {
    using T = decltype(type);
    with_vector(vectors_fit({args.x_TD, args.y_RD}), [&](auto vector) {
      constexpr int V = decltype(vector)::value;
      const Grid grid = row_grid(tokens, ceil_div(width, V));
      unpermute_kernel<T, V><<<grid.blocks, grid.threads, 0, stream_of(ctx)>>>(
          data_of<T>(args.y_RD), args.y_RD.row_stride, args.row_of_slot_N.i32(), data_of<T>(args.x_TD),
          args.x_TD.row_stride, tokens, static_cast<int>(width), static_cast<int>(args.top_k),
          args.accumulate);
    });
  });
  check_launch("unpermute");
  if (!args.y_values_R) return;
  const int64_t slots = tokens * args.top_k;
  gather_values_kernel<<<static_cast<unsigned>(ceil_div(slots, 256)), 256, 0, stream_of(ctx)>>>(
      args.y_values_R.f32(), args.row_of_slot_N.i32(), args.values_N.f32(), slots);
  check_launch("unpermute");
}

}  // namespace biomoe::cuda
