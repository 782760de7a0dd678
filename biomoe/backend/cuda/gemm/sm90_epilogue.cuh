// What a consumer warpgroup does with its half of a finished tile: rounding, the fused activation functions,
// and stores through shared memory. Output goes in boxes of 64 rows by 128 bytes, each written by the
// warpgroup into a staging slot and stored by its first thread with the copy engine.
//
// The accumulators are packed to BF16 as soon as they are complete; the rest is cut into steps, each a box or
// half of one, that run between the products of the next tile. A step's slots and phases are compile-time
// constants: every tile takes the same number of turns of each slot, and an even one where boxes are loaded.
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
constexpr int kTurnBarrier = 3;       // + consumer warpgroup

// Staging slots of one consumer warpgroup, used in turn.
template <class Config>
class Staging {
  static constexpr int kSlots = Config::kSlots;

 public:
  __device__ Staging(uint32_t slots, uint32_t loaded, int warpgroup)
      : slots_(slots), loaded_(loaded), barrier_(kWarpgroupBarrier + warpgroup) {}

  __device__ bool leader() const { return threadIdx.x % kWarpgroup == 0; }
  __device__ uint32_t slot(int turn) const { return slots_ + turn % kSlots * kBoxBytes; }
  __device__ uint32_t held(int box) const { return slots_ + (kSlots + box) * kBoxBytes; }

  // Waits until the last store from this turn's slot has read it; returns its address.
  __device__ uint32_t acquire(int turn) const {
    if (leader()) bulk_wait_read<kSlots - 1>();
    sync();
    return slot(turn);
  }

  // The same for every slot and held box.
  __device__ void acquire_all() const {
    if (leader()) bulk_wait_read<0>();
    sync();
  }

  // Stores what the warpgroup wrote into the slot.
  __device__ void publish(int turn, const CUtensorMap* map, BoxCoordinates at, bool add = false) const {
    fence_async_shared();
    sync();
    if (leader()) store(turn, map, at, add);
  }

  __device__ void sync() const { named_barrier_sync(barrier_, kWarpgroup); }

  // The leader alone, once all have fenced and met; a commit follows.
  __device__ static void store_box(uint32_t box, const CUtensorMap* map, BoxCoordinates at, bool add) {
    if (add) {
      tma_reduce_add(map, box, at);
    } else {
      tma_store(map, box, at);
    }
  }
  __device__ void store(int turn, const CUtensorMap* map, BoxCoordinates at, bool add) const {
    store_box(slot(turn), map, at, add);
    bulk_commit();
  }

  // Boxes that are read, changed in place and stored: the leader starts the load once every earlier store has
  // been read; all wait for it before they read the slot.
  __device__ void start_load(int turn, const CUtensorMap* map, BoxCoordinates at) const {
    bulk_wait_read<0>();
    const uint32_t barrier = loaded_ + turn % kSlots * 8;
    mbarrier_arrive_expect(barrier, kBoxBytes);
    tma_load(slot(turn), map, barrier, at);
  }
  __device__ void wait_load(int turn) const { mbarrier_wait(loaded_ + turn % kSlots * 8, turn / kSlots & 1); }

 private:
  uint32_t slots_;
  uint32_t loaded_;
  int barrier_;
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

// Rounded results of eight columns: rows `row` and `row + 8`.
struct PackedColumns {
  uint32_t upper, lower;
};

// A warpgroup's half of a tile whose sums are complete. A half that is not live is zero, and its accumulators
// are not defined. Held results are in shared memory, not in columns.
template <class Config>
struct Finished {
  PackedColumns columns[Config::kHeld ? 1 : Config::kTileN / 8];  // of FP32 results: the accumulators of the
                                                                  // right half, in their order
  int row;                                                        // first row in the output
  int n;
  int n_tile;
  int expert;
  float prob_upper, prob_lower;  // of the thread's rows
  float sum_upper, sum_lower;    // of the probabilities' gradient (or, the first, of squares)
};

template <class Config>
__device__ __forceinline__ void place_result(const KernelParams& params, const Tile& tile, int warpgroup,
                                             Finished<Config>& finished) {
  finished.row = tile.m + warpgroup * kBoxRows;
  finished.n = tile.n;
  finished.n_tile = tile.n_tile;
  finished.expert = Config::kSumOverRows ? tile.expert : 0;
  if constexpr (Config::kProduct == Product::kGateUp || Config::kProduct == Product::kDownDgrad) {
    const int row = finished.row + fragment_place().row;
    finished.prob_upper = params.prob[row];
    finished.prob_lower = params.prob[row + 8];
  }
  finished.sum_upper = finished.sum_lower = 0.0f;
}

template <class Config>
__device__ __forceinline__ void pack_result(bool live, const float (&acc)[Config::kSums],
                                            Finished<Config>& finished) {
#pragma unroll
  for (int c = 0; c < Config::kTileN / 8; ++c) {
    const float* d = acc + 4 * c;
    finished.columns[c] = {live ? pack_bf16(d[0], d[1]) : 0u, live ? pack_bf16(d[2], d[3]) : 0u};
  }
}

// Columns [8 kFirst, 8 kFirst + 8 kCount) of a box of 64.
template <int kFirst, int kCount>
__device__ __forceinline__ void write_columns(const PackedColumns* columns, uint32_t box,
                                              const FragmentPlace& place) {
#pragma unroll
  for (int c = 0; c < kCount; c += 2) {
    store_block(block_address(box, place.warp_row, kFirst + c, place.lane),
                {{columns[c].upper, columns[c].lower, columns[c + 1].upper, columns[c + 1].lower}});
  }
}

// A box of 32 columns of dw in FP32. value(c, half): the two results of row `row` + 8 half, columns 8 c + 2
// pair and its right neighbour.
template <class Value>
__device__ __forceinline__ void write_fp32_box(uint32_t box, Value value) {
  const FragmentPlace place = fragment_place();
#pragma unroll
  for (int c = 0; c < 4; ++c) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint2 pair = value(c, half);
      const uint32_t address =
          swizzled_chunk(box, place.row + 8 * half, 2 * c + place.pair / 2) + place.pair % 2 * 8;
      asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(pair.x), "r"(pair.y) : "memory");
    }
  }
}

__device__ __forceinline__ float add_squares(uint32_t pair, float sum) {
  return fmaf(high_bf16(pair), high_bf16(pair), fmaf(low_bf16(pair), low_bf16(pair), sum));
}

// With params.partials: adds the squares of 64 columns of dw.
template <class Config>
__device__ __forceinline__ void sum_squares(const KernelParams& params, const PackedColumns* columns,
                                            Finished<Config>& finished) {
  if (params.partials == nullptr) return;
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    finished.sum_upper = add_squares(columns[c].upper, finished.sum_upper);
    finished.sum_upper = add_squares(columns[c].lower, finished.sum_upper);
  }
}

// The sum of squares of the warp's 16 rows, once all columns are in it.
template <class Config>
__device__ __forceinline__ void store_square_sum(const KernelParams& params,
                                                 const Finished<Config>& finished) {
  if (params.partials == nullptr) return;
  float sum = finished.sum_upper;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
  if (threadIdx.x % 32 == 0 && finished.n_tile < params.n_tiles) {
    const int64_t row_blocks = (params.m_extent + kTileM - 1) / kTileM * (kTileM / 16);
    const int64_t row_block = finished.expert * row_blocks + (finished.row + fragment_place().warp_row) / 16;
    params.partials[row_block * params.n_tiles + finished.n_tile] = sum;
  }
}

// Writes the boxes kFirst to kFirst + kHeldBoxes of a tile's results, as `write(box, address)` does, and
// stores them.
template <class Config, int kFirst, class Write>
__device__ __forceinline__ void store_held(const KernelParams& params, const Finished<Config>& finished,
                                           const Staging<Config>& staging, bool add, Write write) {
  staging.acquire_all();
#pragma unroll
  for (int box = 0; box < Config::kHeldBoxes; ++box) write(kFirst + box, staging.held(box));
  fence_async_shared();
  staging.sync();
  if (!staging.leader()) return;
  constexpr int kColumns = Config::kFp32 ? 32 : 64;
#pragma unroll
  for (int box = 0; box < Config::kHeldBoxes; ++box) {
    staging.store_box(staging.held(box), &params.out,
                      {finished.n + (kFirst + box) * kColumns, finished.row, finished.expert}, add);
  }
  bulk_commit();
}

// Rounds a tile's results into their boxes and stores these. Results in FP32 take two turns.
template <class Config>
__device__ __forceinline__ void hold_result(const KernelParams& params, bool live,
                                            const float (&acc)[Config::kSums], Finished<Config>& finished,
                                            const Staging<Config>& staging) {
  const bool add = Config::kSumOverRows && params.accumulate;
  if constexpr (Config::kFp32) {
    const auto write = [&](int box, uint32_t address) {
      write_fp32_box(address, [&](int c, int half) {
        const int i = 4 * (box * 4 + c) + 2 * half;
        return make_uint2(live ? __float_as_uint(acc[i]) : 0u, live ? __float_as_uint(acc[i + 1]) : 0u);
      });
    };
    store_held<Config, 0>(params, finished, staging, add, write);
    store_held<Config, Config::kHeldBoxes>(params, finished, staging, add, write);
    return;
  }
  const auto write = [&](int box, uint32_t address) {
    PackedColumns columns[8];
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const float* d = acc + 4 * (8 * box + c);
      columns[c] = {live ? pack_bf16(d[0], d[1]) : 0u, live ? pack_bf16(d[2], d[3]) : 0u};
    }
    write_columns<0, 8>(columns, address, fragment_place());
    if constexpr (Config::kSumOverRows) sum_squares(params, columns, finished);
  };
  store_held<Config, 0>(params, finished, staging, add, write);
  if constexpr (Config::kSumOverRows) store_square_sum<Config>(params, finished);
}

// A tile cut along k: leaves this part in the workspace; the warpgroup that comes last, whichever part it
// has, adds all parts up in their order and gives the sums to put(vector, sums of accumulators 4 vector to 4
// vector + 3). Returns whether this one was it. `arrived` is a word of shared memory.
template <class Config, class Put>
__device__ __forceinline__ bool sum_parts(const KernelParams& params, const Tile& tile, int warpgroup,
                                          uint32_t arrived, const float (&acc)[Config::kSums], Put put) {
  constexpr int kVectors = Config::kSums / 4;
  constexpr int kBatch = 8;  // vectors in flight
  const int half = tile.split_tile * 2 + warpgroup;
  int* ticket = static_cast<int*>(params.workspace) + half;
  float4* parts = reinterpret_cast<float4*>(static_cast<uint8_t*>(params.workspace) + kSplitTicketBytes) +
                  static_cast<int64_t>(half) * tile.parts * kVectors * kWarpgroup + threadIdx.x % kWarpgroup;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    parts[(tile.part * kVectors + v) * kWarpgroup] =
        make_float4(acc[4 * v], acc[4 * v + 1], acc[4 * v + 2], acc[4 * v + 3]);
  }
  __threadfence();
  named_barrier_sync(kWarpgroupBarrier + warpgroup, kWarpgroup);
  if (threadIdx.x % kWarpgroup == 0) {
    const int before = atomicAdd(ticket, 1);
    if (before == tile.parts - 1) *ticket = 0;
    __threadfence();
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(arrived), "r"(before) : "memory");
  }
  named_barrier_sync(kWarpgroupBarrier + warpgroup, kWarpgroup);
  int before;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(before) : "r"(arrived) : "memory");
  if (before != tile.parts - 1) return false;
#pragma unroll
  for (int first = 0; first < kVectors; first += kBatch) {
    float4 sum[kBatch] = {};
    for (int part = 0; part < tile.parts; ++part) {
#pragma unroll
      for (int v = 0; v < kBatch; ++v) {
        const float4 more = __ldcg(&parts[(part * kVectors + first + v) * kWarpgroup]);
        sum[v] = {sum[v].x + more.x, sum[v].y + more.y, sum[v].z + more.z, sum[v].w + more.w};
      }
    }
#pragma unroll
    for (int v = 0; v < kBatch; ++v) put(first + v, sum[v]);
  }
  return true;
}

// A box of y, dx or dw; with params.partials also the sum of squares of the warp's 16 rows.
template <class Config, int kStep>
__device__ __forceinline__ void store_bf16_step(const KernelParams& params, Finished<Config>& finished,
                                                const Staging<Config>& staging) {
  const PackedColumns* columns = finished.columns + 8 * kStep;
  const bool add = Config::kSumOverRows && params.accumulate;
  write_columns<0, 8>(columns, staging.acquire(kStep), fragment_place());
  staging.publish(kStep, &params.out, {finished.n + kStep * 64, finished.row, finished.expert}, add);
  if constexpr (Config::kSumOverRows) {
    sum_squares(params, columns, finished);
    if constexpr (kStep + 1 == Config::kSteps) store_square_sum<Config>(params, finished);
  }
}

__device__ __forceinline__ uint32_t scaled_swiglu_pair(uint32_t gate, uint32_t up, float prob) {
  return pack_bf16(scaled_swiglu(low_bf16(gate), low_bf16(up), prob),
                   scaled_swiglu(high_bf16(gate), high_bf16(up), prob));
}

// Each 128 columns of gate_up are two boxes of it, then one of act, computed from the rounded values in two
// steps.
template <class Config, int kStep>
__device__ __forceinline__ void store_gate_up_step(const KernelParams& params,
                                                   const Finished<Config>& finished,
                                                   const Staging<Config>& staging) {
  constexpr int kGroup = kStep / 4;
  constexpr int kPart = kStep % 4;
  constexpr int kTurn = 3 * kGroup + (kPart < 2 ? kPart : 2);
  const FragmentPlace place = fragment_place();
  const PackedColumns* group = finished.columns + 16 * kGroup;
  if constexpr (kPart < 2) {
    write_columns<0, 8>(group + 8 * kPart, staging.acquire(kTurn), place);
    staging.publish(kTurn, &params.out, {finished.n + kGroup * 128 + kPart * 64, finished.row, 0});
  } else {
    constexpr int kHalf = kPart - 2;
    const PackedColumns* gate = group + 8 * kHalf;
    const PackedColumns* up = gate + 4;
    PackedColumns act[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      act[c] = {scaled_swiglu_pair(gate[c].upper, up[c].upper, finished.prob_upper),
                scaled_swiglu_pair(gate[c].lower, up[c].lower, finished.prob_lower)};
    }
    if constexpr (kHalf == 0) staging.acquire(kTurn);
    write_columns<4 * kHalf, 4>(act, staging.slot(kTurn), place);
    if constexpr (kHalf == 1) {
      staging.publish(kTurn, &params.aux, {finished.n / 2 + kGroup * 64, finished.row, 0});
    }
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

// Features [16 kHalf, 16 kHalf + 16) of a box of gate_up, 32 features, turned in place into dgate_up.
template <class Config>
__device__ __forceinline__ void turn_into_gradient(Finished<Config>& finished, uint32_t box, int half,
                                                   const MatrixBlock& dact) {
  const FragmentPlace place = fragment_place();
  const uint32_t gate_address = block_address(box, place.warp_row, 2 * half, place.lane);
  const uint32_t up_address = block_address(box, place.warp_row, 2 * half + 4, place.lane);
  MatrixBlock gate = load_block(gate_address);
  MatrixBlock up = load_block(up_address);
#pragma unroll
  for (int side = 0; side < 2; ++side) {
    finished.sum_upper +=
        swiglu_gradient_pair(dact.r[2 * side], finished.prob_upper, gate.r[2 * side], up.r[2 * side]);
    finished.sum_lower += swiglu_gradient_pair(dact.r[2 * side + 1], finished.prob_lower,
                                               gate.r[2 * side + 1], up.r[2 * side + 1]);
  }
  store_block(gate_address, gate);
  store_block(up_address, up);
}

// Row sums of dact silu(gate) up over the tile's columns.
template <class Config>
__device__ __forceinline__ void store_dprob_partials(const KernelParams& params,
                                                     const Finished<Config>& finished) {
  const FragmentPlace place = fragment_place();
  float upper = finished.sum_upper;
  float lower = finished.sum_lower;
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    upper += __shfl_xor_sync(0xFFFFFFFFu, upper, step);
    lower += __shfl_xor_sync(0xFFFFFFFFu, lower, step);
  }
  if (place.pair == 0 && finished.n_tile < params.n_tiles) {
    const int64_t row = finished.row + place.row;
    params.partials[row * params.n_tiles + finished.n_tile] = upper;
    params.partials[(row + 8) * params.n_tiles + finished.n_tile] = lower;
  }
}

// Step 0 starts to load box 0 of gate_up; steps 2 b + 1 and 2 b + 2 turn the halves of box b, 64 columns for
// 32 of dact, and the first of them starts to load the box after it.
template <class Config, int kStep>
__device__ __forceinline__ void store_dgate_up_step(const KernelParams& params, Finished<Config>& finished,
                                                    const Staging<Config>& staging) {
  constexpr int kBoxes = (Config::kSteps - 1) / 2;
  constexpr int kBox = (kStep - 1) / 2;
  constexpr int kHalf = (kStep - 1) % 2;
  const auto load = [&](int box) {
    if (box < kBoxes && staging.leader()) {
      staging.start_load(box, &params.aux, {2 * finished.n + box * 64, finished.row, 0});
    }
  };
  if constexpr (kStep == 0) {
    load(0);
  } else {
    if constexpr (kHalf == 0) {
      load(kBox + 1);
      staging.wait_load(kBox);
    }
    const PackedColumns* dact = finished.columns + kBox * 4 + 2 * kHalf;
    turn_into_gradient<Config>(finished, staging.slot(kBox), kHalf,
                               {{dact[0].upper, dact[0].lower, dact[1].upper, dact[1].lower}});
    if constexpr (kHalf == 1) {
      staging.publish(kBox, &params.out, {2 * finished.n + kBox * 64, finished.row, 0});
      if constexpr (kBox == kBoxes - 1) store_dprob_partials(params, finished);
    }
  }
}

// FP32: the left half of the warpgroup's tile, a box in every slot; keeps the accumulators of the right half.
template <class Config>
__device__ __forceinline__ void store_fp32_half(const KernelParams& params, bool live,
                                                const float (&acc)[Config::kSums], Finished<Config>& finished,
                                                const Staging<Config>& staging) {
  constexpr int kSlots = Config::kSlots;
  const auto bits = [&](int i) { return live ? __float_as_uint(acc[i]) : 0u; };
  staging.acquire_all();
#pragma unroll
  for (int box = 0; box < kSlots; ++box) {
    write_fp32_box(staging.slot(box), [&](int c, int half) {
      const int i = 4 * (box * 4 + c) + 2 * half;
      return make_uint2(bits(i), bits(i + 1));
    });
  }
#pragma unroll
  for (int c = 0; c < Config::kTileN / 8; ++c) {
    const int i = Config::kSums / 2 + 2 * c;
    finished.columns[c] = {bits(i), bits(i + 1)};
  }
  fence_async_shared();
  staging.sync();
  if (!staging.leader()) return;
#pragma unroll
  for (int box = 0; box < kSlots; ++box) {
    staging.store(box, &params.out, {finished.n + box * 32, finished.row, finished.expert},
                  params.accumulate);
  }
}

// A box of the right half.
template <class Config, int kStep>
__device__ __forceinline__ void store_fp32_step(const KernelParams& params, const Finished<Config>& finished,
                                                const Staging<Config>& staging) {
  constexpr int kTurn = Config::kSlots + kStep;
  static_assert(Config::kSlots + Config::kSteps == Config::kTileN / 32);
  write_fp32_box(staging.acquire(kTurn), [&](int c, int half) {
    const PackedColumns& pair = finished.columns[2 * (kStep * 4 + c) + half];
    return make_uint2(pair.upper, pair.lower);
  });
  staging.publish(kTurn, &params.out, {finished.n + kTurn * 32, finished.row, finished.expert},
                  params.accumulate);
}

// One step of the epilogue.
template <class Config, int kStep>
__device__ __forceinline__ void finish_step(const KernelParams& params, Finished<Config>& finished,
                                            const Staging<Config>& staging) {
  // Hides from the compiler that these do not change in the loop over k: it would compute everything that
  // follows from them ahead of that loop, and spill it.
#pragma unroll
  for (int c = 0; c < Config::kTileN / 8; ++c) {
    asm volatile("" : "+r"(finished.columns[c].upper), "+r"(finished.columns[c].lower));
  }
  if constexpr (Config::kProduct == Product::kGateUp) {
    store_gate_up_step<Config, kStep>(params, finished, staging);
  } else if constexpr (Config::kProduct == Product::kDownDgrad) {
    store_dgate_up_step<Config, kStep>(params, finished, staging);
  } else if constexpr (Config::kFp32) {
    store_fp32_step<Config, kStep>(params, finished, staging);
  } else {
    store_bf16_step<Config, kStep>(params, finished, staging);
  }
}

template <class Config, int kStep = 0>
__device__ __forceinline__ void finish_step(int step, const KernelParams& params, Finished<Config>& finished,
                                            const Staging<Config>& staging) {
  if constexpr (kStep < Config::kSteps) {
    if (step == kStep) {
      finish_step<Config, kStep>(params, finished, staging);
    } else {
      finish_step<Config, kStep + 1>(step, params, finished, staging);
    }
  }
}

template <class Config, int kStep = 0>
__device__ __forceinline__ void finish_all(const KernelParams& params, Finished<Config>& finished,
                                           const Staging<Config>& staging) {
  if constexpr (kStep < Config::kSteps) {
    finish_step<Config, kStep>(params, finished, staging);
    finish_all<Config, kStep + 1>(params, finished, staging);
  }
}

}  // namespace biomoe::cuda::sm90
