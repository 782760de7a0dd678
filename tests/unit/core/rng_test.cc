#include "biomoe/core/rng.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>

namespace biomoe {
namespace {

using Word4 = std::array<uint32_t, 4>;

// The published known-answer vectors of philox4x32 with 10 rounds (Random123, tests/kat_vectors).
TEST(Philox, KnownAnswers) {
  EXPECT_EQ(philox4x32({0, 0, 0, 0}, {0, 0}), (Word4{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox4x32({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (Word4{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Word4{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Rng, SeedStreamSubstreamAndCounterAllMatter) {
  const Rng base(1, RngStream::kInit);
  EXPECT_EQ(base.bits(5), Rng(1, RngStream::kInit).bits(5));
  std::set<Word4> words{base.bits(5),
                        base.bits(6),
                        base.bits(5 + (uint64_t{1} << 32)),
                        Rng(2, RngStream::kInit).bits(5),
                        Rng(1 + (uint64_t{1} << 32), RngStream::kInit).bits(5),
                        Rng(1, RngStream::kShuffle).bits(5),
                        Rng(1, RngStream::kInit, 1).bits(5)};
  EXPECT_EQ(words.size(), 7u);
}

TEST(Rng, UniformIsInRangeWithTheRightMoments) {
  const Rng rng(9, RngStream::kTest);
  constexpr int kDraws = 200'000;
  double sum = 0, squares = 0;
  for (uint64_t i = 0; i < kDraws; ++i) {
    const double value = rng.uniform(i);
    ASSERT_GE(value, 0.0);
    ASSERT_LT(value, 1.0);
    sum += value;
    squares += value * value;
  }
  const double mean = sum / kDraws;
  // Four standard errors.
  EXPECT_NEAR(mean, 0.5, 4 * std::sqrt(1.0 / 12 / kDraws));
  EXPECT_NEAR(squares / kDraws, 1.0 / 3, 4 * std::sqrt(4.0 / 45 / kDraws));
}

TEST(Rng, NormalHasTheRightMoments) {
  const Rng rng(9, RngStream::kTest);
  constexpr int kDraws = 200'000;
  double moments[5] = {};
  for (uint64_t i = 0; i < kDraws; ++i) {
    const double value = rng.normal(i);
    ASSERT_TRUE(std::isfinite(value));
    double power = 1;
    for (double& moment : moments) {
      moment += power / kDraws;
      power *= value;
    }
  }
  // Four standard errors of each moment's mean.
  EXPECT_NEAR(moments[1], 0, 4 * std::sqrt(1.0 / kDraws));
  EXPECT_NEAR(moments[2], 1, 4 * std::sqrt(2.0 / kDraws));
  EXPECT_NEAR(moments[3], 0, 4 * std::sqrt(15.0 / kDraws));
  EXPECT_NEAR(moments[4], 3, 4 * std::sqrt(96.0 / kDraws));
}

}  // namespace
}  // namespace biomoe
