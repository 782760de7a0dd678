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
constexpr int kStages = 4;
constexpr int kSlots = 2;  // boxes of epilogue staging a consumer warpgroup has

constexpr int kStagingOffset = kStages * kStageBytes;
constexpr int kBarrierOffset = kStagingOffset + 2 * kSlots * kBoxBytes;
constexpr int kTileSlots = 2;  // tiles that the producer may be ahead
constexpr int kBarriers = 2 * kStages + 2 * kSlots + 2 * kTileSlots;
constexpr int kTileBytes = 32;
constexpr int kMaxSplits = 8;       // parts of a tile
constexpr int kMinSplitBlocks = 8;  // blocks of k that a part has
constexpr int kTilesOffset = kBarrierOffset + kBarriers * 8;
constexpr int kArrivedOffset = kTilesOffset + kTileSlots * kTileBytes;  // a word a consumer warpgroup
constexpr int kUnitsOffset = kArrivedOffset + 2 * 4;
constexpr int kSharedBytes = kUnitsOffset + (kMaxExperts + 1) * 4 + 1024;  // 1024 to align the start
static_assert(kSharedBytes <= kMaxSharedBytes);

template <Product kProductOf, int kClusterOf>
struct Config {
  static constexpr Product kProduct = kProductOf;
  static constexpr int kCluster = kClusterOf;
  static constexpr bool kSumOverRows = kProduct == Product::kWgrad || kProduct == Product::kWgradFp32;
  static constexpr bool kAMnMajor = kSumOverRows;
  static constexpr bool kBMnMajor = kProduct != Product::kForward && kProduct != Product::kGateUp;

  static constexpr bool kSplit = kProduct == Product::kForward || kProduct == Product::kDgrad;

  // The epilogue of a tile runs in steps between the products of the next one, a step every kStepPeriod
  // blocks of k. FP32 results do not fit beside the next tile's accumulators: they are stored at once.
  static constexpr bool kDeferred = kProduct != Product::kWgradFp32;
  static constexpr int kSteps = kProduct == Product::kGateUp ? 6 : kProduct == Product::kDownDgrad ? 9 : 4;
  static constexpr int kStepPeriod = kProduct == Product::kDownDgrad ? 2 : 1;
};

}  // namespace biomoe::cuda::sm90
