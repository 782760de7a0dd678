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

  __device__ uint32_t stage(int stage) const { return base + stage * Config::kStageBytes; }
  // Of a stage's rows of A, one each; and after them that of its block of B.
  __device__ uint32_t scales(int stage) const {
    return base + Config::kScalesOffset + stage * Config::kScaleBytes;
  }
  __device__ uint32_t full(int stage) const { return base + Config::kBarrierOffset + stage * 8; }
  __device__ uint32_t empty(int stage) const { return full(Config::kStages + stage); }
  __device__ uint32_t staging(int warpgroup) const {
    return base + Config::kStagingOffset + warpgroup * Config::kStagingBytes;
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
  if constexpr (Config::kAMnMajor) return {tile.m + box * kBoxRows, tile.a_row + k_block * Config::kTileK, 0};
  return {k_block * Config::kTileK, tile.a_row + box * kBoxRows, 0};
}

template <class Config>
__device__ __forceinline__ BoxCoordinates b_box(const Tile& tile, int k_block, int box) {
  const int n = tile.n + box * kBoxRows;
  if constexpr (Config::kSumOverRows) return {n, tile.a_row + k_block * Config::kTileK, 0};
  if constexpr (Config::kBMnMajor) return {n, k_block * Config::kTileK, tile.expert};
  return {k_block * Config::kTileK, n, tile.expert};
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

// The scales of one block of k. A tile beyond the last column is multiplied with zeros, by any scale.
template <class Config>
__device__ __forceinline__ void load_scales(const KernelParams& params, const Tile& tile, int k_block,
                                            uint32_t scales, uint32_t full) {
  const int64_t n = min(tile.n_tile, params.n_tiles - 1);
  bulk_load(scales, params.row_scales + k_block * params.row_scales_stride + tile.a_row,
            Config::kRowScaleBytes, full);
  load_word(scales + Config::kRowScaleBytes,
            params.weight_scales + tile.expert * params.expert_stride + n * params.n_stride +
                k_block * params.k_stride,
            full);
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
      const uint32_t full = shared.full(ring.stage);
      mbarrier_arrive_expect(full, Config::kStageBytes + (Config::kFp8 ? Config::kRowScaleBytes : 0));
      load_stage<Config>(params, tile, tile.k_begin + k_block, rank, shared.stage(ring.stage), full);
      if constexpr (Config::kFp8) {
        load_scales<Config>(params, tile, tile.k_begin + k_block, shared.scales(ring.stage), full);
      }
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
__device__ __forceinline__ void multiply_stage(uint32_t stage, int warpgroup, float (&acc)[Config::kSums]) {
  constexpr bool kA = Config::kAMnMajor;
  constexpr bool kB = Config::kBMnMajor;
  const uint64_t a = wgmma_descriptor(stage + warpgroup * kBoxBytes, 0);  // a block of A is one box
  const uint64_t b = wgmma_descriptor(stage + kABoxes * kBoxBytes, kB ? kBoxBytes : 0);
  wgmma_fence();
  wgmma_m64n256k16<kA, kB, kAdd>(acc, a, b);
#pragma unroll
  for (int step = 1; step < Config::kTileK / kWgmmaK; ++step) {
    wgmma_m64n256k16<kA, kB, true>(acc, a + step * kWgmmaStepK<kA>, b + step * kWgmmaStepK<kB>);
  }
  wgmma_commit();
  wgmma_wait<1>();
}

// Products of one tile into the accumulators; every stage is released. between(turn) is called with the
// products of block `turn` in flight, from 1 on; issued() with those of the last.
template <class Config, class Between, class Issued>
__device__ __forceinline__ void multiply(const SharedLayout<Config>& shared, int k_blocks, int warpgroup,
                                         RingState<Config>& ring, float (&acc)[Config::kSums],
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
  release_stage<Config>(shared, ring.last());
}

// Starts the products of one stage of codes.
template <class Config>
__device__ __forceinline__ void multiply_codes(uint32_t stage, int warpgroup,
                                               float (&partial)[Config::kSums]) {
  const uint64_t a = wgmma_descriptor(stage + warpgroup * kBoxBytes, 0);
  const uint64_t b = wgmma_descriptor(stage + kABoxes * kBoxBytes, 0);
  constexpr uint64_t kStep = kWgmmaCodesK >> 4;
  wgmma_fence();
  wgmma_e4m3_m64n128k32<false>(partial, a, b);
#pragma unroll
  for (int step = 1; step < Config::kTileK / kWgmmaCodesK; ++step) {
    wgmma_e4m3_m64n128k32<true>(partial, a + step * kStep, b + step * kStep);
  }
  wgmma_commit();
}

// A block of k of a tile of codes: its product in registers, and the scales of the thread's rows, times that
// of the block of weights.
template <class Config>
struct ScaledProduct {
  float partial[Config::kSums];
  float upper, lower;

  // Waits until the stage is filled, and starts the product.
  __device__ __forceinline__ void start(const SharedLayout<Config>& shared, const RingState<Config>& ring,
                                        int warpgroup) {
    const uint32_t row = static_cast<uint32_t>(warpgroup * kBoxRows + fragment_place().row);
    mbarrier_wait(shared.full(ring.stage), ring.phase);
    const uint32_t scales = shared.scales(ring.stage);
    const float of_block = load_shared(scales + Config::kRowScaleBytes);
    upper = load_shared(scales + row * 4) * of_block;
    lower = load_shared(scales + (row + 8) * 4) * of_block;
    multiply_codes<Config>(shared.stage(ring.stage), warpgroup, partial);
  }
  // Once the product is complete.
  __device__ __forceinline__ void add_to(float (&sums)[Config::kSums]) {
    pin_registers(partial);
#pragma unroll
    for (int i = 0; i < Config::kSums; ++i) sums[i] = fmaf(partial[i], i & 2 ? lower : upper, sums[i]);
  }
};

// The same as multiply() for codes: each block of k is a product of its own, scaled and added in FP32 while
// that of the next block runs. between(turn) is called for turns 1 to between_turns().
template <class Config, class Between, class Issued>
__device__ __forceinline__ void multiply_scaled(const SharedLayout<Config>& shared, int k_blocks,
                                                int warpgroup, RingState<Config>& ring,
                                                float (&sums)[Config::kSums], Between between,
                                                Issued issued) {
  ScaledProduct<Config> even, odd;
#pragma unroll
  for (int i = 0; i < Config::kSums; ++i) sums[i] = 0.0f;
  // Starts the next block, and adds the one before.
  const auto follow = [&](ScaledProduct<Config>& next, ScaledProduct<Config>& before) {
    next.start(shared, ring, warpgroup);
    wgmma_wait<1>();
    release_stage<Config>(shared, ring.last());
    ring.advance();
    before.add_to(sums);
  };
  even.start(shared, ring, warpgroup);
  ring.advance();
  int k_block = 1;
  for (; k_block + 1 < k_blocks; k_block += 2) {
    follow(odd, even);
    follow(even, odd);
    between((k_block + 1) / 2);
  }
  if (k_block < k_blocks) {
    follow(odd, even);
    issued();
    wgmma_wait<0>();
    release_stage<Config>(shared, ring.last());
    odd.add_to(sums);
  } else {
    issued();
    wgmma_wait<0>();
    release_stage<Config>(shared, ring.last());
    even.add_to(sums);
  }
}

// How often multiply() or multiply_scaled() calls between().
template <class Config>
__device__ __forceinline__ int between_turns(int k_blocks) {
  return Config::kFp8 ? (k_blocks - 1) / 2 : k_blocks - 1;
}

// When the steps of a pending epilogue run: evenly over the blocks of k of the next tile, and the two
// warpgroups by turns, so that the products of one keep the tensor cores busy during a step of the other.
template <class Config>
struct StepSchedule {
  int step = Config::kSteps;  // next one; kSteps: none is pending
  int at = 0;                 // turn between products that is its own
  int period = 0;

  __device__ bool due(int turn) const { return step < Config::kSteps && turn == at; }

  // turns >= kSteps: every step finds one.
  __device__ void start(int turns, int warpgroup) {
    step = 0;
    period = turns / max(1, Config::kSteps);
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
  float acc[Config::kSums];
  Finished<Config> finished;
  StepSchedule<Config> schedule;
  TileQueue tiles = shared.tiles();
  Tile tile = tiles.pop();
  bool live = tile.k_blocks > 0 && tile.live_rows > warpgroup * kBoxRows;
  while (tile.k_blocks >= 0) {
    Tile upcoming;
    const auto look_ahead = [&] { upcoming = tiles.pop(); };
    const auto between = [&](int turn) {
      if (schedule.due(turn)) finish_step<Config>(schedule.next(), params, finished, staging);
    };
    if (!live) {  // padding only: the stages still pass
      // Without products nothing keeps the lanes of a warp together: those that release stages must not leave
      // the others behind by a whole turn of the ring, whose phase they would then wait for in vain.
      for (int k_block = 0; k_block < tile.k_blocks; ++k_block) {
        pass_stage<Config>(shared, ring, k_block == 0, [](uint32_t) { __syncwarp(); });
      }
      look_ahead();
      if (tile.k_blocks > 0) release_stage<Config>(shared, ring.last());
    } else if constexpr (Config::kFp8) {
      multiply_scaled<Config>(shared, tile.k_blocks, warpgroup, ring, acc, between, look_ahead);
    } else {
      multiply<Config>(shared, tile.k_blocks, warpgroup, ring, acc, between, look_ahead);
    }
    place_result<Config>(params, tile, warpgroup, finished);
    bool whole = true;
    if (Config::kSplit && live && tile.parts > 1) {
      whole = sum_parts<Config>(
          params, tile, warpgroup, shared.arrived(warpgroup), acc, [&](int vector, const float4& sums) {
            if constexpr (Config::kHeld) {
              acc[4 * vector] = sums.x;
              acc[4 * vector + 1] = sums.y;
              acc[4 * vector + 2] = sums.z;
              acc[4 * vector + 3] = sums.w;
            } else {
              finished.columns[vector] = {pack_bf16(sums.x, sums.y), pack_bf16(sums.z, sums.w)};
            }
          });
    } else if constexpr (Config::kFp32) {
      store_fp32_half(params, live, acc, finished, staging);
    } else if constexpr (!Config::kHeld) {
      pack_result(live, acc, finished);
    }
    if (Config::kHeld && whole) hold_result<Config>(params, live, acc, finished, staging);
    live = upcoming.k_blocks > 0 && upcoming.live_rows > warpgroup * kBoxRows;
    if (whole) {
      const int turns = between_turns<Config>(upcoming.k_blocks);
      if (live && turns >= Config::kSteps) {
        schedule.start(turns, warpgroup);
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
      mbarrier_init(shared.full(stage), Config::kFp8 ? 2 : 1);  // the producer, and its load_word
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
