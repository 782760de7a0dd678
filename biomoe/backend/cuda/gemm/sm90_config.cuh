// Shape of one kernel of the family: what it computes, its tile, and its shared memory.
#pragma once

#include <cstdint>

#include "biomoe/backend/cuda/gemm/grouped_gemm_sm90.h"

namespace biomoe::cuda::sm90 {

enum class Product { kForward, kGateUp, kDgrad, kDownDgrad, kWgrad, kWgradFp32 };

// A tile has 128 rows: each of the two consumer warpgroups holds 64 of them.
constexpr int kTileM = kSegmentRows;
constexpr int kBoxRows = 64;         // operands move in boxes of 64 rows of 128 bytes, one swizzled row each:
constexpr int kBoxBytes = 64 * 128;  // 64 columns of BF16 or 128 codes (outputs too; 32 columns of FP32)
constexpr int kWarpgroup = 128;
constexpr int kThreads = 3 * kWarpgroup;  // one producer, two consumers
constexpr int kConsumerWarps = 8;
constexpr int kProducerRegisters = 40;
constexpr int kConsumerRegisters = 232;
constexpr int kMaxSharedBytes = 227 * 1024;

constexpr int kABoxes = kTileM / kBoxRows;
constexpr int kTileSlots = 2;  // tiles that the producer may be ahead
constexpr int kTileBytes = 32;
constexpr int kMaxSplits = 8;       // parts of a tile
constexpr int kMinSplitBlocks = 8;  // blocks of k that a part has

template <Product kProductOf, OperandType kTypeOf, int kClusterOf>
struct Config {
  static constexpr Product kProduct = kProductOf;
  static constexpr bool kFp8 = kTypeOf == OperandType::kFp8;
  static constexpr int kCluster = kClusterOf;
  static constexpr int kTileN = kTileColumns;
  static constexpr int kTileK = kFp8 ? kScaleBlock : 64;        // 128 bytes
  static constexpr int kSums = kBoxRows * kTileN / kWarpgroup;  // accumulators a thread
  static constexpr bool kSumOverRows = kProduct == Product::kWgrad || kProduct == Product::kWgradFp32;
  // Codes are K-major: for a sum over rows they lie transposed.
  static constexpr bool kAMnMajor = !kFp8 && kSumOverRows;
  static constexpr bool kBMnMajor = !kFp8 && kProduct != Product::kForward && kProduct != Product::kGateUp;

  static constexpr bool kSplit = kProduct == Product::kForward || kProduct == Product::kDgrad;

  // The epilogue of a tile runs in steps between the products of the next one. Of FP32 results only half fit
  // into registers beside the next tile's accumulators: the other half goes to shared memory at once. Of
  // codes none do, beside sums and a product in flight: the rounded results are held in shared memory, from
  // where they are stored without a step.
  static constexpr bool kFp32 = kProduct == Product::kWgradFp32;
  static constexpr bool kHeld = kFp8;
  static_assert(!kFp8 || (kProduct != Product::kGateUp && kProduct != Product::kDownDgrad));
  static constexpr int kSteps = kProduct == Product::kGateUp      ? kTileN / 32
                                : kProduct == Product::kDownDgrad ? 2 * (kTileN / 32) + 1
                                : kHeld                           ? 0
                                                                  : kTileN / 64;

  static constexpr int kBBoxes = kTileN / kBoxRows;
  static constexpr int kStageBytes = (kABoxes + kBBoxes) * kBoxBytes;
  static constexpr int kStages = kFp8 || kFp32 ? 3 : 4;
  // Of a stage of codes: the scales of the tile's rows, and those of its blocks of weights or its columns.
  static constexpr int kRowScaleBytes = kTileM * 4;
  static constexpr int kScaleBytes = kFp8 ? kRowScaleBytes + (kSumOverRows ? kTileN * 4 : 16) : 0;
  static constexpr int kCountedScaleBytes = kSumOverRows ? kScaleBytes : kFp8 ? kRowScaleBytes : 0;
  // Boxes of epilogue staging a consumer warpgroup has, and after them those of held results.
  static constexpr int kSlots = kHeld ? 0 : kFp32 ? 4 : 2;
  static constexpr int kHeldBoxes = kHeld ? kTileN / 64 : 0;
  static constexpr int kStagingBytes = (kSlots + kHeldBoxes) * kBoxBytes;
  // Of these, those that gate_up is loaded into for its gradient.
  static constexpr int kLoadSlots = kProduct == Product::kDownDgrad ? kSlots : 0;
  static constexpr int kBarriers = 2 * kStages + 2 * kLoadSlots + 2 * kTileSlots;

  static constexpr int kStagingOffset = kStages * kStageBytes;
  static constexpr int kScalesOffset = kStagingOffset + 2 * kStagingBytes;
  static constexpr int kBarrierOffset = kScalesOffset + kStages * kScaleBytes;
  static constexpr int kTilesOffset = kBarrierOffset + kBarriers * 8;
  static constexpr int kArrivedOffset = kTilesOffset + kTileSlots * kTileBytes;  // a word a warpgroup
  static constexpr int kUnitsOffset = kArrivedOffset + 2 * 4;
  static constexpr int kSharedBytes = kUnitsOffset + (kMaxExperts + 1) * 4;
  static_assert(kSharedBytes <= kMaxSharedBytes && kTilesOffset % 16 == 0);
};

}  // namespace biomoe::cuda::sm90
