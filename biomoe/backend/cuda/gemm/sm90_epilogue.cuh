// What a consumer warpgroup does with a finished tile: rounding, the fused activation functions, and stores
// through shared memory. Output goes in boxes of 64 rows by 128 bytes, each written by the warpgroup into a
// slot of its ring and stored by its first thread with the copy engine.
#pragma once

#include "biomoe/backend/cuda/device/mbarrier.cuh"
#include "biomoe/backend/cuda/device/swiglu.cuh"
#include "biomoe/backend/cuda/device/tma.cuh"
#include "biomoe/backend/cuda/device/warp_matrix.cuh"
#include "biomoe/backend/cuda/device/wgmma.cuh"
#include "biomoe/backend/cuda/gemm/sm90_scheduler.cuh"

namespace biomoe::cuda::sm90 {

// Named barriers of a block.
constexpr int kWarpgroupBarrier = 1;  // + consumer warpgroup
constexpr int kOrderBarrier = 3;      // + consumer warpgroup

// Staging slots of one consumer warpgroup, used in turn.
template <class Config>
class StagingRing {
 public:
  __device__ StagingRing(uint32_t slots, uint32_t loaded, int warpgroup)
      : slots_(slots), loaded_(loaded), barrier_(kWarpgroupBarrier + warpgroup) {}

  __device__ bool leader() const { return threadIdx.x % kWarpgroup == 0; }
  __device__ uint32_t slot() const { return slots_ + slot_ * kBoxBytes; }

  // Waits until the slot's last store has read it; returns its address.
  __device__ uint32_t acquire() {
    if (leader()) bulk_wait_read<Config::kSlots - 1>();
    named_barrier_sync(barrier_, kWarpgroup);
    return slot();
  }

  // Stores what the warpgroup wrote into the slot, and moves on to the next one.
  __device__ void publish(const CUtensorMap* map, BoxCoordinates at, bool add = false) {
    fence_async_shared();
    named_barrier_sync(barrier_, kWarpgroup);
    if (leader()) {
      if (add) {
        tma_reduce_add(map, slot(), at);
      } else {
        tma_store(map, slot(), at);
      }
      bulk_commit();
    }
    slot_ = (slot_ + 1) % Config::kSlots;
  }

  // Boxes that are read, changed in place and stored. start_load(ahead) is called by the leader once the slot
  // that lies `ahead` slots on is free; wait_load() before the current slot is read; publish() ends its use.
  __device__ void start_load(int ahead, const CUtensorMap* map, BoxCoordinates at) {
    const int slot = (slot_ + ahead) % Config::kSlots;
    mbarrier_arrive_expect(loaded_ + slot * 8, kBoxBytes);
    tma_load(slots_ + slot * kBoxBytes, map, loaded_ + slot * 8, at);
  }

  __device__ void wait_load() {
    mbarrier_wait(loaded_ + slot_ * 8, (load_phases_ >> slot_) & 1);
    load_phases_ ^= 1u << slot_;
  }

 private:
  uint32_t slots_;
  uint32_t loaded_;
  int barrier_;
  int slot_ = 0;
  uint32_t load_phases_ = 0;
};

// This thread's place in a block of 64 rows: rows row and row + 8, columns 2 pair and 2 pair + 1 of every 8.
struct FragmentPlace {
  int warp_row;  // first row of the warp
  int lane;
  int row;
  int pair;
};

__device__ __forceinline__ FragmentPlace fragment_place() {
  const int lane = threadIdx.x % 32;
  const int warp_row = static_cast<int>(threadIdx.x % kWarpgroup) / 32 * 16;
  return {warp_row, lane, warp_row + lane / 4, lane % 4};
}

// Rounded accumulators of eight columns: rows `row` and `row + 8`. A block that is not live is zero, and its
// accumulators are not defined.
struct PackedColumns {
  uint32_t upper, lower;
};

template <int kCount>
__device__ __forceinline__ PackedColumns pack_columns(const float (&acc)[kCount], int columns8, bool live) {
  const float* d = acc + 4 * columns8;
  return {live ? pack_bf16(d[0], d[1]) : 0u, live ? pack_bf16(d[2], d[3]) : 0u};
}

// A box of 64 columns of the output, rounded to BF16.
template <int kCount>
__device__ __forceinline__ void write_box(const float (&acc)[kCount], int columns8, bool live, uint32_t box,
                                          const FragmentPlace& place) {
#pragma unroll
  for (int c = 0; c < 8; c += 2) {
    const PackedColumns left = pack_columns(acc, columns8 + c, live);
    const PackedColumns right = pack_columns(acc, columns8 + c + 1, live);
    store_block(block_address(box, place.warp_row, c, place.lane),
                {{left.upper, left.lower, right.upper, right.lower}});
  }
}

// Sum over the warpgroup in a fixed order, by way of `scratch` (four floats); the leader returns it.
__device__ __forceinline__ float warpgroup_sum(float value, uint32_t scratch, int barrier) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xFFFFFFFFu, value, step);
  const int warp = static_cast<int>(threadIdx.x % kWarpgroup) / 32;
  if (threadIdx.x % 32 == 0)
    asm volatile("st.shared.f32 [%0], %1;" ::"r"(scratch + 4 * warp), "f"(value) : "memory");
  named_barrier_sync(barrier, kWarpgroup);
  float sum = 0.0f;
  if (threadIdx.x % kWarpgroup == 0) {
    float part[4];
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(part[0]), "=f"(part[1]), "=f"(part[2]), "=f"(part[3])
                 : "r"(scratch)
                 : "memory");
    sum = (part[0] + part[1]) + (part[2] + part[3]);
  }
  return sum;
}

// y, dx or dw in BF16.
template <class Config>
__device__ __forceinline__ void store_bf16(const KernelParams& params, const Tile& tile, int block, bool live,
                                           const float (&acc)[Config::kAccumulators],
                                           StagingRing<Config>& ring) {
  const FragmentPlace place = fragment_place();
  const int expert = Config::kSumOverRows ? tile.expert : 0;
  const bool add = Config::kSumOverRows && params.accumulate;
#pragma unroll
  for (int box = 0; box < Config::kTileN / 64; ++box) {
    const uint32_t slot = ring.acquire();
    write_box(acc, box * 8, live, slot, place);
    ring.publish(&params.out, {tile.n + box * 64, tile.m + block * kBoxRows, expert}, add);
  }
}

// Sum of squares of a block's rounded values, into params.partials.
template <class Config>
__device__ __forceinline__ void store_square_sum(const KernelParams& params, const Tile& tile, int block,
                                                 bool live, const float (&acc)[Config::kAccumulators],
                                                 StagingRing<Config>& ring, int barrier) {
  float squares = 0.0f;
#pragma unroll
  for (int c = 0; c < Config::kTileN / 8; ++c) {
    const PackedColumns packed = pack_columns(acc, c, live);
    squares = fmaf(low_bf16(packed.upper), low_bf16(packed.upper), squares);
    squares = fmaf(high_bf16(packed.upper), high_bf16(packed.upper), squares);
    squares = fmaf(low_bf16(packed.lower), low_bf16(packed.lower), squares);
    squares = fmaf(high_bf16(packed.lower), high_bf16(packed.lower), squares);
  }
  const uint32_t scratch = ring.acquire();
  const float sum = warpgroup_sum(squares, scratch, barrier);
  if (ring.leader() && tile.n_tile < params.n_tiles) {
    const int64_t row_blocks = (params.m_extent + Config::kTileM - 1) / Config::kTileM * 2;
    const int64_t row_block = tile.expert * row_blocks + tile.m / kBoxRows + block;
    params.partials[row_block * params.n_tiles + tile.n_tile] = sum;
  }
  named_barrier_sync(barrier, kWarpgroup);  // the scratch is free again
}

// dw in FP32: boxes of 32 columns.
template <class Config>
__device__ __forceinline__ void store_fp32(const KernelParams& params, const Tile& tile, int block, bool live,
                                           const float (&acc)[Config::kAccumulators],
                                           StagingRing<Config>& ring) {
  const FragmentPlace place = fragment_place();
#pragma unroll
  for (int box = 0; box < Config::kTileN / 32; ++box) {
    const uint32_t slot = ring.acquire();
#pragma unroll
    for (int c = 0; c < 4; ++c) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* d = acc + 4 * (box * 4 + c) + 2 * half;
        const uint32_t address =
            swizzled_chunk(slot, place.row + 8 * half, 2 * c + place.pair / 2) + place.pair % 2 * 8;
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(live ? d[0] : 0.0f),
                     "f"(live ? d[1] : 0.0f)
                     : "memory");
      }
    }
    ring.publish(&params.out, {tile.n + box * 32, tile.m + block * kBoxRows, tile.expert}, params.accumulate);
  }
}

__device__ __forceinline__ uint32_t scaled_swiglu_pair(uint32_t gate, uint32_t up, float prob) {
  return pack_bf16(scaled_swiglu(low_bf16(gate), low_bf16(up), prob),
                   scaled_swiglu(high_bf16(gate), high_bf16(up), prob));
}

// gate_up, and act from its rounded values: each 128 columns of gate_up are two boxes of it and one of act.
template <class Config>
__device__ __forceinline__ void store_gate_up(const KernelParams& params, const Tile& tile, int block,
                                              bool live, const float (&acc)[Config::kAccumulators],
                                              StagingRing<Config>& ring) {
  const FragmentPlace place = fragment_place();
  const int row = tile.m + block * kBoxRows;
  const float prob_upper = params.prob[row + place.row];
  const float prob_lower = params.prob[row + place.row + 8];
#pragma unroll
  for (int group = 0; group < Config::kTileN / 128; ++group) {
    PackedColumns act[8];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int columns8 = group * 16 + half * 8;
      const uint32_t slot = ring.acquire();
      write_box(acc, columns8, live, slot, place);
      ring.publish(&params.out, {tile.n + columns8 * 8, row, 0});
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const PackedColumns gate = pack_columns(acc, columns8 + c, live);
        const PackedColumns up = pack_columns(acc, columns8 + 4 + c, live);
        act[half * 4 + c] = {scaled_swiglu_pair(gate.upper, up.upper, prob_upper),
                             scaled_swiglu_pair(gate.lower, up.lower, prob_lower)};
      }
    }
    const uint32_t slot = ring.acquire();
#pragma unroll
    for (int c = 0; c < 8; c += 2) {
      store_block(block_address(slot, place.warp_row, c, place.lane),
                  {{act[c].upper, act[c].lower, act[c + 1].upper, act[c + 1].lower}});
    }
    ring.publish(&params.aux, {tile.n / 2 + group * 64, row, 0});
  }
}

__device__ __forceinline__ float swiglu_gradient_pair(uint32_t dact, float prob, uint32_t& gate,
                                                      uint32_t& up) {
  const ScaledSwigluGradient low = scaled_swiglu_gradient(low_bf16(dact), low_bf16(gate), low_bf16(up), prob);
  const ScaledSwigluGradient high =
      scaled_swiglu_gradient(high_bf16(dact), high_bf16(gate), high_bf16(up), prob);
  gate = pack_bf16(low.dgate, high.dgate);
  up = pack_bf16(low.dup, high.dup);
  return low.dprob + high.dprob;
}

// The boxes of gate_up that belong to a warpgroup's part of a tile of dact, in the order of their use: 64
// columns of gate_up stand for 32 of dact.
template <class Config>
struct GateUpBoxes {
  static constexpr int kPerBlock = Config::kTileN / 32;
  static constexpr int kCount = Config::kBlocksM * kPerBlock;

  __device__ static BoxCoordinates at(const Tile& tile, int first_block, int box) {
    return {2 * tile.n + box % kPerBlock * 64, tile.m + (first_block + box / kPerBlock) * kBoxRows, 0};
  }
};

// Starts to load the first boxes of gate_up; called by the leader before the tile's products. One slot stays
// out, so that later loads need not wait for the newest store.
template <class Config>
__device__ __forceinline__ void start_gate_up(const KernelParams& params, const Tile& tile, int first_block,
                                              StagingRing<Config>& ring) {
  bulk_wait_read<0>();
#pragma unroll
  for (int box = 0; box < Config::kSlots - 1; ++box) {
    ring.start_load(box, &params.aux, GateUpBoxes<Config>::at(tile, first_block, box));
  }
}

// dgate_up of one block of 64 rows, in place over the loaded gate_up, and the row sums of dact silu(gate) up.
template <class Config>
__device__ __forceinline__ void store_dgate_up(const KernelParams& params, const Tile& tile, int first_block,
                                               int block, bool live,
                                               const float (&acc)[Config::kAccumulators],
                                               StagingRing<Config>& ring) {
  using Boxes = GateUpBoxes<Config>;
  const FragmentPlace place = fragment_place();
  const int row = tile.m + (first_block + block) * kBoxRows + place.row;
  const float prob_upper = params.prob[row];
  const float prob_lower = params.prob[row + 8];
  float dprob_upper = 0.0f;
  float dprob_lower = 0.0f;
#pragma unroll
  for (int box = 0; box < Boxes::kPerBlock; ++box) {
    const int index = block * Boxes::kPerBlock + box;
    ring.wait_load();
#pragma unroll
    for (int c = 0; c < 4; c += 2) {
      const uint32_t gate_address = block_address(ring.slot(), place.warp_row, c, place.lane);
      const uint32_t up_address = block_address(ring.slot(), place.warp_row, c + 4, place.lane);
      MatrixBlock gate = load_block(gate_address);
      MatrixBlock up = load_block(up_address);
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        const PackedColumns dact = pack_columns(acc, box * 4 + c + side, live);
        dprob_upper += swiglu_gradient_pair(dact.upper, prob_upper, gate.r[2 * side], up.r[2 * side]);
        dprob_lower += swiglu_gradient_pair(dact.lower, prob_lower, gate.r[2 * side + 1], up.r[2 * side + 1]);
      }
      store_block(gate_address, gate);
      store_block(up_address, up);
    }
    ring.publish(&params.out, Boxes::at(tile, first_block, index));
    // The slot after the loads in flight was stored from last but one box ago: only the newest store may
    // pend.
    if (index + Config::kSlots - 1 < Boxes::kCount && ring.leader()) {
      bulk_wait_read<1>();
      ring.start_load(Config::kSlots - 2, &params.aux,
                      Boxes::at(tile, first_block, index + Config::kSlots - 1));
    }
  }
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    dprob_upper += __shfl_xor_sync(0xFFFFFFFFu, dprob_upper, step);
    dprob_lower += __shfl_xor_sync(0xFFFFFFFFu, dprob_lower, step);
  }
  if (place.pair == 0 && tile.n_tile < params.n_tiles) {
    params.partials[static_cast<int64_t>(row) * params.n_tiles + tile.n_tile] = dprob_upper;
    params.partials[static_cast<int64_t>(row + 8) * params.n_tiles + tile.n_tile] = dprob_lower;
  }
}

}  // namespace biomoe::cuda::sm90
