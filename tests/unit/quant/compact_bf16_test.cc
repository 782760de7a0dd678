#include "biomoe/quant/compact_bf16.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "biomoe/core/rng.h"

namespace biomoe {
namespace {

using Eight = std::array<uint16_t, 8>;

double value_of(uint16_t bits) {
  return static_cast<double>(std::bit_cast<float>(static_cast<uint32_t>(bits) << 16));
}

// Where x is more than 2^-15 of the power of two below the largest, x; else a zero of its sign. 2^-127 of
// BF16 is not a normal number: below 2^-111 there is nothing so small.
uint16_t expected(uint16_t x, const Eight& of) {
  double largest = 0;
  for (const uint16_t bits : of) largest = std::max(largest, std::abs(value_of(bits)));
  int exponent = 0;
  std::frexp(largest, &exponent);
  const bool stays = largest < 0x1p-111 || std::abs(value_of(x)) > std::ldexp(1.0, exponent - 1 - 15);
  return stays ? x : static_cast<uint16_t>(x & 0x8000u);
}

TEST(CompactBf16, WhatIsLargeEnoughComesBackBitForBit) {
  const Rng rng(1, RngStream::kTest, 0);
  uint64_t next = 0;
  int zeros = 0, whole = 0;
  for (uint32_t largest = 0; largest < 255; ++largest) {
    for (uint32_t other = 0; other <= largest; ++other) {
      Eight bits;
      for (size_t i = 0; i < bits.size(); ++i) {
        const uint32_t exponent = i == (largest + other) % 8 ? largest : i % 3 == 1 ? other / 2 : other;
        const uint32_t noise = rng.bits(next++)[0];
        bits[i] = static_cast<uint16_t>((noise & 0x807fu) | exponent << 7);
      }
      const Eight back = CompactBf16::of(bits).bits();
      for (size_t i = 0; i < bits.size(); ++i) {
        ASSERT_EQ(back[i], expected(bits[i], bits)) << largest << " " << other << " " << i;
        ++(bits[i] == back[i] ? whole : zeros);
      }
    }
  }
  EXPECT_GT(zeros, 1000);
  EXPECT_GT(whole, 10000);
}

TEST(CompactBf16, BordersZerosAndWhatIsNotFinite) {
  const uint16_t one = 0x3f80, border = 0x3f80 - (15 << 7);
  const Eight bits{one, border, border + 1, 0x8000 | border, 0x8000 | (border + 1), 0, 0x8000, 0x3fff};
  EXPECT_EQ(CompactBf16::of(bits).bits(),
            (Eight{one, 0, border + 1, 0x8000, 0x8000 | (border + 1), 0, 0x8000, 0x3fff}));
  EXPECT_EQ(CompactBf16::of(Eight{}).bits(), Eight{});
  // Subnormal numbers alone.
  const Eight small{1, 2, 0x7f, 0x8001, 0x80ff, 0x100, 0x77f, 0};
  EXPECT_EQ(CompactBf16::of(small).bits(), small);
  const uint16_t infinity = 0x7f80, nan = 0xffc1, huge = 0x7900;
  EXPECT_EQ(CompactBf16::of(Eight{infinity, 0xff80, nan, huge, one, 0, 0, 0}).bits(),
            (Eight{infinity, 0xff80, nan, huge, 0, 0, 0, 0}));
}

TEST(CompactBf16, ThePlanesFollowEachOther) {
  const CompactLayout layout{12, 16};
  EXPECT_EQ(CompactLayout::row_bytes(16), 52);
  EXPECT_EQ(layout.high_plane(), 12 * 2 * 2 * 8);
  EXPECT_EQ(layout.exponent_plane() - layout.high_plane(), 12 * 2 * 2 * 4);
  EXPECT_EQ(layout.bytes() - layout.exponent_plane(), 12 / 4 * 2 * 2 * 4);
}

}  // namespace
}  // namespace biomoe
