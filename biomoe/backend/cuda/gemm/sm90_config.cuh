// Shape of one kernel of the family: what it computes, its tile, and its shared memory.
#pragma once

#include <cstdint>

#include "biomoe/backend/cuda/gemm/grouped_gemm_sm90.h"

namespace biomoe::cuda::sm90 {

enum class Product { kForward, kGateUp, kDgrad, kDownDgrad, kWgrad, kWgradFp32 };

// A tile is 128 x 256: each of the two consumer warpgroups holds 64 of its rows.
constexpr int kTileM = 128;
constexpr int kTileN = kTileColumns;
constexpr int kTileK = 64;           // 128 bytes of BF16: one swizzled row
constexpr int kBoxRows = 64;         // operands move in boxes of 64 x 64 elements
constexpr int kBoxBytes = 64 * 128;  // (outputs too; 64 x 32 in FP32)
constexpr int kWarpgroup = 128;
constexpr int kThreads = 3 * kWarpgroup;  // one producer, two consumers
constexpr int kConsumerWarps = 8;
constexpr int kAccumulators = kBoxRows * kTileN / kWarpgroup;  // a thread
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;
constexpr int kMaxSharedBytes = 227 * 1024;

constexpr int kABoxes = kTileM / kBoxRows;
constexpr int kBBoxes = kTileN / kBoxRows;
constexpr int kStageBytes = (kABoxes + kBBoxes) * kBoxBytes;
constexpr int kTileSlots = 2;  // tiles that the producer may be ahead
constexpr int kTileBytes = 32;
constexpr int kMaxSplits = 8;       // parts of a tile
constexpr int kMinSplitBlocks = 8;  // blocks of k that a part has

template <Product kProductOf, int kClusterOf>
struct Config {
  static constexpr Product kProduct = kProductOf;
  static constexpr int kCluster = kClusterOf;
  static constexpr bool kSumOverRows = kProduct == Product::kWgrad || kProduct == Product::kWgradFp32;
  static constexpr bool kAMnMajor = kSumOverRows;
  static constexpr bool kBMnMajor = kProduct != Product::kForward && kProduct != Product::kGateUp;

  static constexpr bool kSplit = kProduct == Product::kForward || kProduct == Product::kDgrad;

  // The epilogue of a tile runs in steps between the products of the next one. Of FP32 results only half fit
  // into registers beside the next tile's accumulators: the other half goes to shared memory at once.
  static constexpr bool kFp32 = kProduct == Product::kWgradFp32;
  static constexpr int kSteps = kProduct == Product::kGateUp ? 8 : kProduct == Product::kDownDgrad ? 17 : 4;

  static constexpr int kStages = kFp32 ? 3 : 4;
  static constexpr int kSlots = kFp32 ? 4 : 2;  // boxes of epilogue staging a consumer warpgroup has
  static constexpr int kBarriers = 2 * kStages + 2 * kSlots + 2 * kTileSlots;

  static constexpr int kStagingOffset = kStages * kStageBytes;
  static constexpr int kBarrierOffset = kStagingOffset + 2 * kSlots * kBoxBytes;
  static constexpr int kTilesOffset = kBarrierOffset + kBarriers * 8;
  static constexpr int kArrivedOffset = kTilesOffset + kTileSlots * kTileBytes;  // a word a warpgroup
  static constexpr int kUnitsOffset = kArrivedOffset + 2 * 4;
  static constexpr int kSharedBytes =
      kUnitsOffset + (kMaxExperts + 1) * 4 + 1024;  // 1024: to align the start
  static_assert(kSharedBytes <= kMaxSharedBytes && kTilesOffset % 16 == 0);
};

}  // namespace biomoe::cuda::sm90
