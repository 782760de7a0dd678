// Shape of one kernel of the family: what it computes, its tile, and its shared memory.
#pragma once

#include <cstdint>

#include "biomoe/backend/cuda/gemm/grouped_gemm_sm90.h"

namespace biomoe::cuda::sm90 {

enum class Product { kForward, kGateUp, kDgrad, kDownDgrad, kWgrad, kWgradFp32 };

constexpr int kTileK = 64;           // 128 bytes of BF16: one swizzled row
constexpr int kBoxRows = 64;         // operands move in boxes of 64 x 64 elements
constexpr int kBoxBytes = 64 * 128;  // (outputs too; 64 x 32 in FP32)
constexpr int kWarpgroup = 128;
constexpr int kThreads = 3 * kWarpgroup;  // one producer, two consumers
constexpr int kConsumerWarps = 8;
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;
constexpr int kMaxSharedBytes = 227 * 1024;

template <Product kProductOf, TileSchedule kScheduleOf, int kClusterOf>
struct Config {
  static constexpr Product kProduct = kProductOf;
  static constexpr bool kPingpong = kScheduleOf == TileSchedule::kPingpong;
  static constexpr int kCluster = kClusterOf;
  static constexpr int kTileM = 128;
  static constexpr int kTileN = kPingpong ? 128 : 256;
  static constexpr int kBlocksM = kPingpong ? 2 : 1;  // blocks of 64 rows a consumer warpgroup holds
  static constexpr int kAccumulators = kTileN * 64 / kWarpgroup;  // of one such block, a thread

  static constexpr bool kSumOverRows = kProduct == Product::kWgrad || kProduct == Product::kWgradFp32;
  static constexpr bool kAMnMajor = kSumOverRows;
  static constexpr bool kBMnMajor = kProduct != Product::kForward && kProduct != Product::kGateUp;

  static constexpr int kABoxes = kTileM / kBoxRows;
  static constexpr int kBBoxes = kTileN / kBoxRows;
  static constexpr int kStageBytes = (kABoxes + kBBoxes) * kBoxBytes;
  static constexpr int kStages = kPingpong ? 5 : 4;
  static constexpr int kSlots = kPingpong ? 4 : 2;  // boxes of epilogue staging a consumer warpgroup has

  static constexpr int kStagingOffset = kStages * kStageBytes;
  static constexpr int kBarrierOffset = kStagingOffset + 2 * kSlots * kBoxBytes;
  static constexpr int kBarriers = 2 * kStages + 2 * kSlots;
  static constexpr int kUnitsOffset = kBarrierOffset + kBarriers * 8;
  static constexpr int kSharedBytes = kUnitsOffset + (kMaxExperts + 1) * 4 + 1024;  // 1024 to align the start
  static_assert(kSharedBytes <= kMaxSharedBytes);
};

}  // namespace biomoe::cuda::sm90
