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
  __device__ void advance(int count) {
    stage += count;
    phase ^= (stage / Config::kStages) & 1;
    stage %= Config::kStages;
  }
};

template <class Config>
struct SharedLayout {
  uint32_t base;

  __device__ uint32_t stage(int stage) const { return base + stage * Config::kStageBytes; }
  __device__ uint32_t full(int stage) const { return base + Config::kBarrierOffset + stage * 8; }
  __device__ uint32_t empty(int stage) const { return full(Config::kStages + stage); }
  __device__ uint32_t staging(int warpgroup) const {
    return base + Config::kStagingOffset + warpgroup * Config::kSlots * kBoxBytes;
  }
  __device__ uint32_t loaded(int warpgroup) const {
    return full(2 * Config::kStages + warpgroup * Config::kSlots);
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
  const uint32_t b_stage = stage + Config::kABoxes * kBoxBytes;
  const bool share_a = Config::kCluster == 2 && !tile.share_b;
  const bool share_b = Config::kCluster == 2 && tile.share_b;
  constexpr uint16_t kBoth = 3;
  if (share_a) {
    tma_load_multicast(stage + rank * kBoxBytes, &params.a, full, a_box<Config>(tile, k_block, rank), kBoth);
  } else {
#pragma unroll
    for (int box = 0; box < Config::kABoxes; ++box) {
      tma_load(stage + box * kBoxBytes, &params.a, full, a_box<Config>(tile, k_block, box));
    }
  }
  if (share_b) {
    constexpr int kHalf = Config::kBBoxes / 2;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const int box = rank * kHalf + i;
      tma_load_multicast(b_stage + box * kBoxBytes, &params.b, full, b_box<Config>(tile, k_block, box),
                         kBoth);
    }
  } else {
#pragma unroll
    for (int box = 0; box < Config::kBBoxes; ++box) {
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
  for (; !walker.done(); walker.next()) {
    const Tile tile = walker.tile();
    for (int k_block = 0; k_block < tile.k_blocks; ++k_block) {
      mbarrier_wait(shared.empty(ring.stage), ring.phase ^ 1);
      mbarrier_arrive_expect(shared.full(ring.stage), Config::kStageBytes);
      load_stage<Config>(params, tile, k_block, rank, shared.stage(ring.stage), shared.full(ring.stage));
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

// Products of one tile into the accumulators, for the first kLive blocks of 64 rows; with none, the stages
// only pass. `issued` is called once everything is under way.
template <class Config, int kLive, class Issued>
__device__ __forceinline__ void multiply(const SharedLayout<Config>& shared, int k_blocks, int first_block,
                                         RingState<Config>& ring,
                                         float (&acc)[Config::kBlocksM][Config::kAccumulators],
                                         Issued issued) {
  constexpr uint32_t kALeading = 0;  // a block of A is one box
  constexpr uint32_t kBLeading = Config::kBMnMajor ? kBoxBytes : 0;
  int previous = -1;
  for (int k_block = 0; k_block < k_blocks; ++k_block) {
    mbarrier_wait(shared.full(ring.stage), ring.phase);
    if constexpr (kLive > 0) {
      const uint32_t stage = shared.stage(ring.stage);
      const uint64_t a = wgmma_descriptor(stage + first_block * kBoxBytes, kALeading);
      const uint64_t b = wgmma_descriptor(stage + Config::kABoxes * kBoxBytes, kBLeading);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kTileK / kWgmmaK; ++step) {
        const uint64_t a_step = a + step * kWgmmaStepK<Config::kAMnMajor>;
        const uint64_t b_step = b + step * kWgmmaStepK<Config::kBMnMajor>;
        const bool add = k_block > 0 || step > 0;
#pragma unroll
        for (int i = 0; i < kLive; ++i) {
          wgmma_m64k16<Config::kAMnMajor, Config::kBMnMajor>(acc[i], a_step + i * (kBoxBytes >> 4), b_step,
                                                             add);
        }
      }
      wgmma_commit();
      wgmma_wait<1>();
    }
    if (previous >= 0) release_stage(shared, previous);
    previous = ring.stage;
    ring.advance();
  }
  issued();
  if constexpr (kLive > 0) {
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kLive; ++i) pin_registers(acc[i]);
  }
  if (previous >= 0) release_stage(shared, previous);
}

template <class Config>
__device__ __forceinline__ void finish(const KernelParams& params, const Tile& tile, int first_block,
                                       int live_blocks,
                                       const float (&acc)[Config::kBlocksM][Config::kAccumulators],
                                       StagingRing<Config>& staging, int warpgroup) {
#pragma unroll
  for (int i = 0; i < Config::kBlocksM; ++i) {
    const bool live = i < live_blocks;
    const int block = first_block + i;
    if constexpr (Config::kProduct == Product::kGateUp) {
      store_gate_up<Config>(params, tile, block, live, acc[i], staging);
    } else if constexpr (Config::kProduct == Product::kDownDgrad) {
      store_dgate_up<Config>(params, tile, first_block, i, live, acc[i], staging);
    } else if constexpr (Config::kProduct == Product::kWgradFp32) {
      store_fp32<Config>(params, tile, block, live, acc[i], staging);
    } else {
      store_bf16<Config>(params, tile, block, live, acc[i], staging);
    }
    if constexpr (Config::kProduct == Product::kWgrad) {
      if (params.partials != nullptr) {
        store_square_sum<Config>(params, tile, block, live, acc[i], staging, kWarpgroupBarrier + warpgroup);
      }
    }
  }
}

// A consumer warpgroup. Cooperative: rows [64 w, 64 w + 64) of every tile. Pingpong: every other tile, with
// the products of the two taking turns.
template <class Config>
__device__ __forceinline__ void consume(const KernelParams& params, const SharedLayout<Config>& shared,
                                        TileWalker<Config> walker, int warpgroup) {
  constexpr int kConsumers = 2 * kWarpgroup;
  StagingRing<Config> staging(shared.staging(warpgroup), shared.loaded(warpgroup), warpgroup);
  RingState<Config> ring;
  float acc[Config::kBlocksM][Config::kAccumulators] = {};
  const int first_block = Config::kPingpong ? 0 : warpgroup;
  for (int turn = 0; !walker.done(); walker.next(), ++turn) {
    const Tile tile = walker.tile();
    if (Config::kPingpong && turn % 2 != warpgroup) {
      ring.advance(tile.k_blocks);
      continue;
    }
    const int live_rows = tile.k_blocks > 0 ? tile.live_rows - first_block * kBoxRows : 0;
    const int live_blocks = live_rows <= 0 ? 0 : (live_rows <= kBoxRows ? 1 : 2);
    if constexpr (Config::kProduct == Product::kDownDgrad) {
      if (staging.leader()) start_gate_up<Config>(params, tile, first_block, staging);
    }
    if (Config::kPingpong && turn > 0) named_barrier_sync(kOrderBarrier + warpgroup, kConsumers);
    const auto pass_turn = [&] {
      if (Config::kPingpong && !walker.last())
        named_barrier_arrive(kOrderBarrier + 1 - warpgroup, kConsumers);
    };
    if (live_blocks >= Config::kBlocksM) {
      multiply<Config, Config::kBlocksM>(shared, tile.k_blocks, first_block, ring, acc, pass_turn);
    } else if (live_blocks == 1) {
      multiply<Config, 1>(shared, tile.k_blocks, first_block, ring, acc, pass_turn);
    } else {
      multiply<Config, 0>(shared, tile.k_blocks, first_block, ring, acc, pass_turn);
    }
    finish<Config>(params, tile, first_block, live_blocks, acc, staging, warpgroup);
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
      mbarrier_init(shared.empty(stage), kConsumerWarps / (Config::kPingpong ? 2 : 1) * Config::kCluster);
    }
    for (int slot = 0; slot < 2 * Config::kSlots; ++slot) mbarrier_init(shared.loaded(0) + slot * 8, 1);
    fence_mbarrier_init();
  }
  if (threadIdx.x / 32 == 1) list_units<Config>(params, unit_begin);
  __syncthreads();
  if constexpr (Config::kCluster > 1) cluster_sync();

  const TileWalker<Config> walker(params, unit_begin, rank);
  const int warpgroup = static_cast<int>(threadIdx.x) / kWarpgroup;
  if (warpgroup == 0) {
    release_registers<kProducerRegisters>();
    if (threadIdx.x == 0) produce<Config>(params, shared, walker, rank);
    __syncwarp();
  } else {
    claim_registers<kConsumerRegisters>();
    consume<Config>(params, shared, walker, warpgroup - 1);
  }
  // The other block may still write into this one's shared memory, or arrive at its barriers.
  if constexpr (Config::kCluster > 1) cluster_sync();
}

}  // namespace biomoe::cuda::sm90
