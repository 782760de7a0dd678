// The kernel of the family. One warpgroup feeds a ring of shared-memory stages with the copy engine; two
// multiply them with wgmma and finish the tiles. Blocks are persistent, one on a multiprocessor.
#pragma once

#include "biomoe/backend/cuda/gemm/sm90_epilogue.cuh"

namespace biomoe::cuda::sm90 {

// Stage and phase of the operand ring.
template <class Config>
struct RingState {
  int stage = 0;
  uint32_t phase = 0;

  __device__ void advance() {
    if (++stage == Config::kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  __device__ int last() const { return stage == 0 ? Config::kStages - 1 : stage - 1; }
};

template <class Config>
struct SharedLayout {
  uint32_t base;

  __device__ uint32_t stage(int stage) const { return base + stage * kStageBytes; }
  __device__ uint32_t full(int stage) const { return base + Config::kBarrierOffset + stage * 8; }
  __device__ uint32_t empty(int stage) const { return full(Config::kStages + stage); }
  __device__ uint32_t staging(int warpgroup) const {
    return base + Config::kStagingOffset + warpgroup * Config::kSlots * kBoxBytes;
  }
  __device__ uint32_t loaded(int warpgroup) const {
    return full(2 * Config::kStages + warpgroup * Config::kSlots);
  }
  __device__ uint32_t arrived(int warpgroup) const { return base + Config::kArrivedOffset + warpgroup * 4; }
  __device__ TileQueue tiles() const {
    return {base + Config::kTilesOffset, full(2 * Config::kStages + 2 * Config::kSlots)};
  }
};

template <class Config>
__device__ __forceinline__ BoxCoordinates a_box(const Tile& tile, int k_block, int box) {
  if constexpr (Config::kAMnMajor) return {tile.m + box * kBoxRows, tile.a_row + k_block * kTileK, 0};
  return {k_block * kTileK, tile.a_row + box * kBoxRows, 0};
}

template <class Config>
__device__ __forceinline__ BoxCoordinates b_box(const Tile& tile, int k_block, int box) {
  const int n = tile.n + box * kBoxRows;
  if constexpr (Config::kSumOverRows) return {n, tile.a_row + k_block * kTileK, 0};
  if constexpr (Config::kBMnMajor) return {n, k_block * kTileK, tile.expert};
  return {k_block * kTileK, n, tile.expert};
}

// Loads one block of k of a tile. In a cluster each block fetches half of the shared operand for both.
template <class Config>
__device__ __forceinline__ void load_stage(const KernelParams& params, const Tile& tile, int k_block,
                                           int rank, uint32_t stage, uint32_t full) {
  const uint32_t b_stage = stage + kABoxes * kBoxBytes;
  const bool share_a = Config::kCluster == 2 && !tile.share_b;
  const bool share_b = Config::kCluster == 2 && tile.share_b;
  constexpr uint16_t kBoth = 3;
  if (share_a) {
    tma_load_multicast(stage + rank * kBoxBytes, &params.a, full, a_box<Config>(tile, k_block, rank), kBoth);
  } else {
#pragma unroll
    for (int box = 0; box < kABoxes; ++box) {
      tma_load(stage + box * kBoxBytes, &params.a, full, a_box<Config>(tile, k_block, box));
    }
  }
  if (share_b) {
    constexpr int kHalf = kBBoxes / 2;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const int box = rank * kHalf + i;
      tma_load_multicast(b_stage + box * kBoxBytes, &params.b, full, b_box<Config>(tile, k_block, box),
                         kBoth);
    }
  } else {
#pragma unroll
    for (int box = 0; box < kBBoxes; ++box) {
      tma_load(b_stage + box * kBoxBytes, &params.b, full, b_box<Config>(tile, k_block, box));
    }
  }
}

// The producer: one thread.
template <class Config>
__device__ __forceinline__ void produce(const KernelParams& params, const SharedLayout<Config>& shared,
                                        TileWalker<Config> walker, int rank) {
  tma_prefetch_map(&params.a);
  tma_prefetch_map(&params.b);
  RingState<Config> ring;
  TileQueue tiles = shared.tiles();
  for (;; walker.next()) {
    const Tile tile = walker.tile();
    tiles.push(tile);
    if (tile.k_blocks < 0) break;
    for (int k_block = 0; k_block < tile.k_blocks; ++k_block) {
      mbarrier_wait(shared.empty(ring.stage), ring.phase ^ 1);
      mbarrier_arrive_expect(shared.full(ring.stage), kStageBytes);
      load_stage<Config>(params, tile, tile.k_begin + k_block, rank, shared.stage(ring.stage),
                         shared.full(ring.stage));
      ring.advance();
    }
  }
}

// Tells the producers of the cluster that this warp no longer reads a stage.
template <class Config>
__device__ __forceinline__ void release_stage(const SharedLayout<Config>& shared, int stage) {
  const int lane = threadIdx.x % 32;
  if constexpr (Config::kCluster == 1) {
    if (lane == 0) mbarrier_arrive(shared.empty(stage));
  } else {
    if (lane < Config::kCluster) mbarrier_arrive_remote(shared.empty(stage), lane);
  }
}

// Waits until the stage is filled, hands it to `use`, and releases the one before, which `use` has finished
// with.
template <class Config, class Use>
__device__ __forceinline__ void pass_stage(const SharedLayout<Config>& shared, RingState<Config>& ring,
                                           bool first, Use use) {
  mbarrier_wait(shared.full(ring.stage), ring.phase);
  use(shared.stage(ring.stage));
  if (!first) release_stage<Config>(shared, ring.last());
  ring.advance();
}

// Starts the products of one stage, and waits for those of the stage before.
template <class Config, bool kAdd>
__device__ __forceinline__ void multiply_stage(uint32_t stage, int warpgroup, float (&acc)[kAccumulators]) {
  constexpr bool kA = Config::kAMnMajor;
  constexpr bool kB = Config::kBMnMajor;
  const uint64_t a = wgmma_descriptor(stage + warpgroup * kBoxBytes, 0);  // a block of A is one box
  const uint64_t b = wgmma_descriptor(stage + kABoxes * kBoxBytes, kB ? kBoxBytes : 0);
  wgmma_fence();
  wgmma_m64n256k16<kA, kB, kAdd>(acc, a, b);
#pragma unroll
  for (int step = 1; step < kTileK / kWgmmaK; ++step) {
    wgmma_m64n256k16<kA, kB, true>(acc, a + step * kWgmmaStepK<kA>, b + step * kWgmmaStepK<kB>);
  }
  wgmma_commit();
  wgmma_wait<1>();
}

// Products of one tile into the accumulators. between(k_block) is called with the products of that block in
// flight, except for the first; issued() with those of the last.
template <class Config, class Between, class Issued>
__device__ __forceinline__ void multiply(const SharedLayout<Config>& shared, int k_blocks, int warpgroup,
                                         RingState<Config>& ring, float (&acc)[kAccumulators],
                                         Between between, Issued issued) {
  pass_stage<Config>(shared, ring, true,
                     [&](uint32_t stage) { multiply_stage<Config, false>(stage, warpgroup, acc); });
  for (int k_block = 1; k_block < k_blocks; ++k_block) {
    pass_stage<Config>(shared, ring, false,
                       [&](uint32_t stage) { multiply_stage<Config, true>(stage, warpgroup, acc); });
    between(k_block);
  }
  issued();
  wgmma_wait<0>();
  pin_registers(acc);
}

// When the steps of a pending epilogue run: evenly over the blocks of k of the next tile, and the two
// warpgroups by turns, so that the products of one keep the tensor cores busy during a step of the other.
template <class Config>
struct StepSchedule {
  int step = Config::kSteps;  // next one; kSteps: none is pending
  int at = 0;                 // block of k that it follows
  int period = 0;

  __device__ bool due(int k_block) const { return step < Config::kSteps && k_block == at; }

  // k_blocks > kSteps: every step finds a block.
  __device__ void start(int k_blocks, int warpgroup) {
    step = 0;
    period = (k_blocks - 1) / Config::kSteps;
    at = 1 + warpgroup * (period / 2);
  }
  __device__ int next() {
    at += period;
    return step++;
  }
};

// A consumer warpgroup: rows [64 w, 64 w + 64) of every tile. The epilogue of a tile runs between the
// products of the next one.
template <class Config>
__device__ __forceinline__ void consume(const KernelParams& params, const SharedLayout<Config>& shared,
                                        int warpgroup) {
  const Staging<Config::kSlots> staging(shared.staging(warpgroup), shared.loaded(warpgroup), warpgroup);
  RingState<Config> ring;
  float acc[kAccumulators];
  Finished finished;
  StepSchedule<Config> schedule;
  TileQueue tiles = shared.tiles();
  Tile tile = tiles.pop();
  bool live = tile.k_blocks > 0 && tile.live_rows > warpgroup * kBoxRows;
  while (tile.k_blocks >= 0) {
    Tile upcoming;
    const auto look_ahead = [&] { upcoming = tiles.pop(); };
    if (live) {
      multiply<Config>(
          shared, tile.k_blocks, warpgroup, ring, acc,
          [&](int k_block) {
            if (schedule.due(k_block)) finish_step<Config>(schedule.next(), params, finished, staging);
          },
          look_ahead);
    } else {  // padding only: the stages still pass
      for (int k_block = 0; k_block < tile.k_blocks; ++k_block) {
        pass_stage<Config>(shared, ring, k_block == 0, [](uint32_t) {});
      }
      look_ahead();
    }
    if (tile.k_blocks > 0) release_stage<Config>(shared, ring.last());
    place_result<Config>(params, tile, warpgroup, finished);
    bool whole = true;
    if (Config::kSplit && live && tile.parts > 1) {
      whole = sum_parts(params, tile, warpgroup, shared.arrived(warpgroup), acc, finished);
    } else if constexpr (Config::kFp32) {
      store_fp32_half(params, live, acc, finished, staging);
    } else {
      pack_result(live, acc, finished);
    }
    live = upcoming.k_blocks > 0 && upcoming.live_rows > warpgroup * kBoxRows;
    if (whole) {
      if (live && upcoming.k_blocks > Config::kSteps) {
        schedule.start(upcoming.k_blocks, warpgroup);
      } else {
        finish_all<Config>(params, finished, staging);
      }
    }
    tile = upcoming;
  }
  if (staging.leader()) bulk_wait_all();
}

template <class Config>
__global__ void __launch_bounds__(kThreads, 1)
    grouped_gemm_kernel(const __grid_constant__ KernelParams params) {
  extern __shared__ uint8_t shared_bytes[];
  uint8_t* aligned = shared_bytes + (1024 - shared_address(shared_bytes) % 1024) % 1024;
  const SharedLayout<Config> shared{shared_address(aligned)};
  int32_t* unit_begin = reinterpret_cast<int32_t*>(aligned + Config::kUnitsOffset);
  const int rank = Config::kCluster == 1 ? 0 : static_cast<int>(cluster_block_rank());

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Config::kStages; ++stage) {
      mbarrier_init(shared.full(stage), 1);
      mbarrier_init(shared.empty(stage), kConsumerWarps * Config::kCluster);
    }
    for (int slot = 0; slot < 2 * Config::kSlots; ++slot) mbarrier_init(shared.loaded(0) + slot * 8, 1);
    shared.tiles().init();
    fence_mbarrier_init();
  }
  if (threadIdx.x / 32 == 1) list_units<Config>(params, unit_begin);
  __syncthreads();
  if constexpr (Config::kCluster > 1) cluster_sync();

  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup;
  if (warpgroup == 0) {
    release_registers<kProducerRegisters>();
    if (threadIdx.x == 0) {
      produce<Config>(params, shared, TileWalker<Config>(params, unit_begin, rank), rank);
    }
    __syncwarp();
  } else {
    claim_registers<kConsumerRegisters>();
    consume<Config>(params, shared, warpgroup - 1);
  }
  // The other block may still write into this one's shared memory, or arrive at its barriers.
  if constexpr (Config::kCluster > 1) cluster_sync();
}

}  // namespace biomoe::cuda::sm90
