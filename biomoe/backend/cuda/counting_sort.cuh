// A stable counting sort of up to 2^31 items by a small key, in three launches: how many items of each block
// of items have each key; where those of each block begin; every item to its place. The result depends on
// nothing but the keys.
#pragma once

#include "biomoe/backend/cuda/device/reduce.cuh"
#include "biomoe/backend/cuda/launch.h"
#include "biomoe/ops/cuda_sizes.h"

namespace biomoe::cuda {

inline constexpr int kSortThreads = 256;

struct SortShape {
  int64_t items;
  int64_t block_items;
  int64_t blocks;
  int bins;
};

// counts[bin * blocks + block]
template <typename Key>
__global__ __launch_bounds__(kSortThreads) void sort_count_kernel(Key key, SortShape shape, int32_t* counts) {
  extern __shared__ int32_t bins[];
  for (int bin = static_cast<int>(threadIdx.x); bin < shape.bins; bin += kSortThreads) bins[bin] = 0;
  __syncthreads();
  const int64_t begin = blockIdx.x * shape.block_items;
  const int64_t end = min(shape.items, begin + shape.block_items);
  for (int64_t i = begin + threadIdx.x; i < end; i += kSortThreads) atomicAdd(bins + key(i), 1);
  __syncthreads();
  for (int bin = static_cast<int>(threadIdx.x); bin < shape.bins; bin += kSortThreads) {
    counts[bin * shape.blocks + blockIdx.x] = bins[bin];
  }
}

// The sums before each of the block's values, and the sum of all. Whole warps along x.
__device__ __forceinline__ int32_t exclusive_sum(int32_t value, int32_t* total) {
  __shared__ int32_t warps[kWarp];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  int32_t inclusive = value;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int32_t other = __shfl_up_sync(0xffffffffu, inclusive, step);
    if (lane >= step) inclusive += other;
  }
  if (lane == kWarp - 1) warps[warp] = inclusive;
  __syncthreads();
  int32_t before = 0, all = 0;
  for (int w = 0; w < static_cast<int>(blockDim.x) / kWarp; ++w) {
    if (w < warp) before += warps[w];
    all += warps[w];
  }
  __syncthreads();
  *total = all;
  return before + inclusive - value;
}

// A block a bin: counts become the sums over the blocks before; totals[bin] is the bin's number of items.
static __global__ __launch_bounds__(kSortThreads) void sort_scan_kernel(SortShape shape, int32_t* counts,
                                                                        int32_t* totals) {
  int32_t* row = counts + int64_t{blockIdx.x} * shape.blocks;
  int32_t base = 0;
  for (int64_t begin = 0; begin < shape.blocks; begin += kSortThreads) {
    const int64_t block = begin + threadIdx.x;
    int32_t total = 0;
    const int32_t before = exclusive_sum(block < shape.blocks ? row[block] : 0, &total);
    if (block < shape.blocks) row[block] = base + before;
    base += total;
  }
  if (threadIdx.x == 0) totals[blockIdx.x] = base;
}

// emit(item, place). Bins begin at multiples of `alignment`; begins(bin, place, count) is called once for
// each bin, and with a count of 0 for the end.
template <typename Key, typename Emit, typename Begins>
__global__ __launch_bounds__(kSortThreads) void sort_place_kernel(Key key, Emit emit, Begins begins,
                                                                  SortShape shape, int32_t alignment,
                                                                  const int32_t* before,
                                                                  const int32_t* totals) {
  extern __shared__ int32_t next[];
  int32_t base = 0;
  for (int first = 0; first < shape.bins; first += kSortThreads) {
    const int bin = first + static_cast<int>(threadIdx.x);
    const int32_t count = bin < shape.bins ? totals[bin] : 0;
    int32_t total = 0;
    const int32_t begin = base + exclusive_sum((count + alignment - 1) / alignment * alignment, &total);
    base += total;
    if (bin >= shape.bins) continue;
    next[bin] = begin + before[bin * shape.blocks + blockIdx.x];
    if (blockIdx.x == 0) begins(bin, begin, count);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) begins(shape.bins, base, 0);
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t end = min(shape.items, (int64_t{blockIdx.x} + 1) * shape.block_items);
  for (int64_t tile = blockIdx.x * shape.block_items; tile < end; tile += kSortThreads) {
    const int64_t i = tile + threadIdx.x;
    const int bin = i < end ? key(i) : -1;
    const unsigned same = __match_any_sync(0xffffffffu, bin);
    const int rank = __popc(same & ((1u << lane) - 1u));
    // Warps take their turns, so that items of one bin keep their order.
    for (int turn = 0; turn < kSortThreads / kWarp; ++turn) {
      if (turn == warp) {
        const int32_t base = bin >= 0 ? next[bin] : 0;
        __syncwarp();
        if (bin >= 0 && rank == 0) next[bin] = base + __popc(same);
        __syncwarp();
        if (bin >= 0) emit(i, base + rank);
      }
      __syncthreads();
    }
  }
}

// Scratch is what counting_sort_scratch_bytes says, taken from the arena by the caller.
template <typename Key, typename Emit, typename Begins>
void counting_sort(const Context& ctx, Arena& scratch, int64_t items, int bins, int32_t alignment,
                   const Key& key, const Emit& emit, const Begins& begins) {
  const ArenaScope scope(scratch);
  SortShape shape{items, sort_block_items(items), 0, bins};
  shape.blocks = std::max<int64_t>(1, ceil_div(items, shape.block_items));
  int32_t* counts = scratch.tensor(DType::kI32, Shape{int64_t{bins} * shape.blocks}).i32();
  int32_t* totals = scratch.tensor(DType::kI32, Shape{bins}).i32();
  const auto blocks = static_cast<unsigned>(shape.blocks);
  const size_t shared = static_cast<size_t>(bins) * sizeof(int32_t);
  sort_count_kernel<<<blocks, kSortThreads, shared, stream_of(ctx)>>>(key, shape, counts);
  check_launch("counting sort: count");
  if (bins > 0) {
    const auto grid = static_cast<unsigned>(bins);
    sort_scan_kernel<<<grid, kSortThreads, 0, stream_of(ctx)>>>(shape, counts, totals);
  }
  check_launch("counting sort: scan");
  sort_place_kernel<<<blocks, kSortThreads, shared, stream_of(ctx)>>>(key, emit, begins, shape, alignment,
                                                                      counts, totals);
  check_launch("counting sort: place");
}

}  // namespace biomoe::cuda
