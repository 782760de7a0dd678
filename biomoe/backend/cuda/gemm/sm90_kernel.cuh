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
  // Of a stage's rows of A, one each; and after them those of its blocks of weights, or of its rows of B.
  __device__ uint32_t scales(int stage) const {
    return base + Config::kScalesOffset + stage * Config::kScaleBytes;
  }
  __device__ uint32_t full(int stage) const { return base + Config::kBarrierOffset + stage * 8; }
  __device__ uint32_t empty(int stage) const { return full(Config::kStages + stage); }
  __device__ uint32_t staging(int warpgroup) const {
    return base + Config::kStagingOffset + warpgroup * Config::kStagingBytes;
  }
  __device__ uint32_t loaded(int warpgroup) const {
    return full(2 * Config::kStages + warpgroup * Config::kLoadSlots);
  }
  __device__ uint32_t arrived(int warpgroup) const { return base + Config::kArrivedOffset + warpgroup * 4; }
  __device__ TileQueue tiles() const {
    return {base + Config::kTilesOffset, full(2 * Config::kStages + 2 * Config::kLoadSlots)};
  }
};

template <class Config>
__device__ __forceinline__ BoxCoordinates a_box(const Tile& tile, int k_block, int box) {
  const int m = tile.m + box * kBoxRows;
  if constexpr (Config::kAMnMajor) return {m, tile.a_row + k_block * Config::kTileK, 0};
  if constexpr (Config::kSumOverRows) return {tile.a_row + k_block * Config::kTileK, m, 0};
  return {k_block * Config::kTileK, tile.a_row + box * kBoxRows, 0};
}

template <class Config>
__device__ __forceinline__ BoxCoordinates b_box(const Tile& tile, int k_block, int box) {
  const int n = tile.n + box * kBoxRows;
  if constexpr (Config::kSumOverRows && Config::kBMnMajor) {
    return {n, tile.a_row + k_block * Config::kTileK, 0};
  }
  if constexpr (Config::kSumOverRows) return {tile.a_row + k_block * Config::kTileK, n, 0};
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

// The scales of one block of k. What lies beyond the last column is multiplied with zeros: any scale will do.
template <class Config>
__device__ __forceinline__ void load_scales(const KernelParams& params, const Tile& tile, int k_block,
                                            uint32_t scales, uint32_t full) {
  constexpr int kBlocks = Config::kTileN / kScaleBlock;
  const uint32_t columns = scales + Config::kRowScaleBytes;
  if constexpr (Config::kSumOverRows) {
    const int64_t block = tile.a_row / kScaleBlock + k_block;
    bulk_load(scales, params.row_scales + block * params.m_extent + tile.m, Config::kRowScaleBytes, full);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const int n = min(tile.n + i * kScaleBlock, params.n_extent - kScaleBlock);
      bulk_load(columns + i * kScaleBlock * 4, params.column_scales + block * params.n_extent + n,
                kScaleBlock * 4, full);
    }
  } else {
    bulk_load(scales, params.row_scales + k_block * params.row_scales_stride + tile.a_row,
              Config::kRowScaleBytes, full);
    const int last = params.n_extent / kScaleBlock - 1;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const int64_t n = min(tile.n_tile * kBlocks + i, last);
      load_word(columns + i * 4, params.column_scales + tile.expert * params.expert_stride +
                                     n * params.n_stride + k_block * params.k_stride);
    }
    arrive_with_words(full);
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
      const uint32_t full = shared.full(ring.stage);
      mbarrier_arrive_expect(full, Config::kStageBytes + Config::kCountedScaleBytes);
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

// The two consumer warpgroups start products of codes by turns: else both finish at once and then both scale,
// with no product running. It gains about 2 %.
template <class Config>
struct Turns {
  static constexpr bool kTaken = Config::kFp8;
  __device__ static void begin(int warpgroup) {
    if constexpr (kTaken) {
      if (warpgroup == 1) pass(warpgroup);
    }
  }
  __device__ static void take(int warpgroup) {
    if constexpr (kTaken) named_barrier_sync(kTurnBarrier + warpgroup, 2 * kWarpgroup);
  }
  __device__ static void pass(int warpgroup) {
    if constexpr (kTaken) named_barrier_arrive(kTurnBarrier + 1 - warpgroup, 2 * kWarpgroup);
  }
};

// Starts the products of half of the columns of a stage of codes.
template <class Config>
__device__ __forceinline__ void multiply_codes(uint32_t stage, int warpgroup, int half,
                                               float (&partial)[Config::kSums / 2]) {
  constexpr int kHalfBytes = Config::kBBoxes / 2 * kBoxBytes;
  const uint64_t a = wgmma_descriptor(stage + warpgroup * kBoxBytes, 0);
  const uint64_t b = wgmma_descriptor(stage + kABoxes * kBoxBytes + half * kHalfBytes, 0);
  constexpr uint64_t kStep = kWgmmaCodesK >> 4;
  Turns<Config>::take(warpgroup);
  wgmma_fence();
  wgmma_e4m3_m64n128k32<false>(partial, a, b);
#pragma unroll
  for (int step = 1; step < Config::kTileK / kWgmmaCodesK; ++step) {
    wgmma_e4m3_m64n128k32<true>(partial, a + step * kStep, b + step * kStep);
  }
  wgmma_commit();
  Turns<Config>::pass(warpgroup);
}

// The scales of a stage, for one thread: of its rows, and where the columns are weights of their blocks.
template <class Config>
class StageScales {
 public:
  __device__ __forceinline__ StageScales(uint32_t scales, int warpgroup)
      : columns_(scales + Config::kRowScaleBytes) {
    const uint32_t row = scales + static_cast<uint32_t>(warpgroup * kBoxRows + fragment_place().row) * 4;
    upper_ = load_shared(row);
    lower_ = load_shared(row + 8 * 4);
    if constexpr (!Config::kSumOverRows) {
      block_[0] = load_shared(columns_);
      block_[1] = load_shared(columns_ + 4);
    }
  }

  // Adds the finished product of half of the columns.
  template <int kHalf>
  __device__ __forceinline__ void add(float (&partial)[Config::kSums / 2],
                                      float (&sums)[Config::kSums]) const {
    constexpr int kCount = Config::kSums / 2;
    pin_registers(partial);
    float* to = sums + kHalf * kCount;
    if constexpr (Config::kSumOverRows) {
      const uint32_t column = columns_ + (kHalf * kCount * 2 + fragment_place().pair * 2) * 4;
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {
        const float2 scale = load_shared_pair(column + i * 8);
        to[i] = fmaf(partial[i], upper_ * scale.x, to[i]);
        to[i + 1] = fmaf(partial[i + 1], upper_ * scale.y, to[i + 1]);
        to[i + 2] = fmaf(partial[i + 2], lower_ * scale.x, to[i + 2]);
        to[i + 3] = fmaf(partial[i + 3], lower_ * scale.y, to[i + 3]);
      }
    } else {
      const float upper = upper_ * block_[kHalf], lower = lower_ * block_[kHalf];
#pragma unroll
      for (int i = 0; i < kCount; ++i) to[i] = fmaf(partial[i], i & 2 ? lower : upper, to[i]);
    }
  }

 private:
  uint32_t columns_;
  float upper_, lower_;
  float block_[2];
};

// The same as multiply() for codes: each block of k is a product of its own, scaled and added in FP32. A
// product of all columns would leave no registers for the sums, so it is made in two halves. What makes it
// fast is the tile: half as wide, it would ask L2 for more than it gives. No epilogue has steps between.
template <class Config, class Issued>
__device__ __forceinline__ void multiply_scaled(const SharedLayout<Config>& shared, int k_blocks,
                                                int warpgroup, RingState<Config>& ring,
                                                float (&sums)[Config::kSums], Issued issued) {
  float partial[Config::kSums / 2];
#pragma unroll
  for (int i = 0; i < Config::kSums; ++i) sums[i] = 0.0f;
  mbarrier_wait(shared.full(ring.stage), ring.phase);
  StageScales<Config> scales(shared.scales(ring.stage), warpgroup);
  for (int k_block = 0; k_block < k_blocks; ++k_block) {
    multiply_codes<Config>(shared.stage(ring.stage), warpgroup, 0, partial);
    wgmma_wait<0>();
    scales.template add<0>(partial, sums);
    const int stage = ring.stage;
    multiply_codes<Config>(shared.stage(stage), warpgroup, 1, partial);
    ring.advance();
    StageScales<Config> next = scales;
    if (k_block + 1 == k_blocks) {
      issued();
    } else {  // what the next product waits for, while this one runs
      mbarrier_wait(shared.full(ring.stage), ring.phase);
      next = StageScales<Config>(shared.scales(ring.stage), warpgroup);
    }
    wgmma_wait<0>();
    if constexpr (Config::kSumOverRows) {  // whose scales are still to be read
      scales.template add<1>(partial, sums);
      __syncwarp();
      release_stage<Config>(shared, stage);
    } else {
      release_stage<Config>(shared, stage);
      scales.template add<1>(partial, sums);
    }
    scales = next;
  }
}

// When the steps of a pending epilogue run: evenly over the blocks of k of the next tile, and the two
// warpgroups by turns, so that the products of one keep the tensor cores busy during a step of the other.
template <class Config>
struct StepSchedule {
  int step = Config::kSteps;  // next one; kSteps: none is pending
  int at = 0;                 // turn between products that is its own
  int first = 0;
  int turns = 0;

  __device__ bool due(int turn) const { return step < Config::kSteps && turn == at; }

  // turns >= kSteps: every step finds one.
  __device__ void start(int of_tile, int warpgroup) {
    step = 0;
    turns = of_tile;
    at = first = 1 + warpgroup * (turns / max(1, Config::kSteps) / 2);
  }
  __device__ int next() {
    const int now = step++;
    at = first + step * turns / max(1, Config::kSteps);
    return now;
  }
};

// A consumer warpgroup: rows [64 w, 64 w + 64) of every tile. The epilogue of a tile runs between the
// products of the next one.
template <class Config>
__device__ __forceinline__ void consume(const KernelParams& params, const SharedLayout<Config>& shared,
                                        int warpgroup) {
  const Staging<Config> staging(shared.staging(warpgroup), shared.loaded(warpgroup), warpgroup);
  Turns<Config>::begin(warpgroup);
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
        for (int half = 0; half < 2; ++half) {
          Turns<Config>::take(warpgroup);
          Turns<Config>::pass(warpgroup);
        }
      }
      look_ahead();
      if (tile.k_blocks > 0) release_stage<Config>(shared, ring.last());
    } else if constexpr (Config::kFp8) {
      multiply_scaled<Config>(shared, tile.k_blocks, warpgroup, ring, acc, look_ahead);
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
    } else if constexpr (Config::kFp32 && !Config::kHeld) {
      store_fp32_half(params, live, acc, finished, staging);
    } else if constexpr (!Config::kHeld) {
      pack_result(live, acc, finished);
    }
    if (Config::kHeld && whole) hold_result<Config>(params, live, acc, finished, staging);
    live = upcoming.k_blocks > 0 && upcoming.live_rows > warpgroup * kBoxRows;
    if (whole) {
      const int turns = upcoming.k_blocks - 1;
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
  extern __shared__ __align__(1024) uint8_t shared_bytes[];  // as the swizzle wants
  const SharedLayout<Config> shared{shared_address(shared_bytes)};
  int32_t* unit_begin = reinterpret_cast<int32_t*>(shared_bytes + Config::kUnitsOffset);
  const int rank = Config::kCluster == 1 ? 0 : static_cast<int>(cluster_block_rank());

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Config::kStages; ++stage) {
      // The producer, and its words.
      mbarrier_init(shared.full(stage), Config::kFp8 && !Config::kSumOverRows ? 2 : 1);
      mbarrier_init(shared.empty(stage), kConsumerWarps * Config::kCluster);
    }
    for (int i = 0; i < 2 * Config::kLoadSlots; ++i) mbarrier_init(shared.loaded(0) + i * 8, 1);
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
