#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "biomoe/core/dtype.h"
#include "biomoe/ops/adamw.h"

namespace biomoe::test {
namespace {

TEST(SplitMasterTest, EveryMasterComesBackBitForBit) {
  for (uint64_t bits = 0; bits < (uint64_t{1} << 32); bits += 9973) {
    for (const uint32_t low : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      const auto master = std::bit_cast<float>((static_cast<uint32_t>(bits) & 0xffff0000u) | low);
      const SplitMaster split = split_master(master);
      const float back = join_master(split.weight, split.remainder);
      if (std::isnan(master)) {
        ASSERT_TRUE(std::isnan(back) && std::isnan(float_from_bf16(split.weight)));
      } else {
        ASSERT_EQ(std::bit_cast<uint32_t>(back), std::bit_cast<uint32_t>(master));
        const float weight = float_from_bf16(split.weight),
                    nearest = float_from_bf16(bf16_from_float(master));
        ASSERT_TRUE(weight == nearest || low == 0x8000u);
      }
    }
  }
}

}  // namespace
}  // namespace biomoe::test
