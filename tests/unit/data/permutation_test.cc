#include "biomoe/data/permutation.h"

#include <gtest/gtest.h>

#include <limits>
#include <set>
#include <vector>

#include "biomoe/core/error.h"

namespace biomoe {
namespace {

std::vector<int64_t> all_of(const Permutation& order) {
  std::vector<int64_t> out;
  for (int64_t i = 0; i < order.size(); ++i) out.push_back(order(i));
  return out;
}

TEST(Permutation, IsABijectionForEverySize) {
  std::vector<int64_t> sizes{4095, 4096, 4097, 20011};
  for (int64_t n = 0; n <= 130; ++n) sizes.push_back(n);
  for (const int64_t n : sizes) {
    std::vector<bool> hit(static_cast<size_t>(n), false);
    for (const int64_t value : all_of(Permutation(n, 7, 3))) {
      ASSERT_GE(value, 0) << n;
      ASSERT_LT(value, n) << n;
      ASSERT_FALSE(hit[static_cast<size_t>(value)]) << n << " hits " << value << " twice";
      hit[static_cast<size_t>(value)] = true;
    }
  }
}

TEST(Permutation, SeedsAndEpochsGiveOrdersOfTheirOwn) {
  std::set<std::vector<int64_t>> orders;
  for (const uint64_t seed : {0ull, 1ull, 2ull, 1ull << 32, 1ull << 63})
    for (const uint32_t epoch : {0u, 1u, 2u, 4000000000u})
      orders.insert(all_of(Permutation(50, seed, epoch)));
  EXPECT_EQ(orders.size(), 20u);
  EXPECT_EQ(all_of(Permutation(50, 1, 1)), all_of(Permutation(50, 1, 1)));
}

// Pearson's statistic of where each position goes: a biased network would send some positions to few places.
TEST(Permutation, SpreadsEveryPositionEvenly) {
  constexpr int64_t kSize = 12;
  constexpr int kEpochs = 4800;
  std::vector<int> counts(kSize * kSize, 0);
  for (uint32_t epoch = 0; epoch < kEpochs; ++epoch) {
    const Permutation order(kSize, 11, epoch);
    for (int64_t i = 0; i < kSize; ++i) ++counts[static_cast<size_t>(i * kSize + order(i))];
  }
  const double expected = static_cast<double>(kEpochs) / kSize;
  double chi2 = 0;
  for (const int count : counts) chi2 += (count - expected) * (count - expected) / expected;
  EXPECT_LT(chi2, 187.0);  // 121 degrees of freedom: exceeded with probability 1e-4
}

TEST(Permutation, HugeSizesStayInRangeWithoutATable) {
  for (const int64_t n :
       {int64_t{1} << 40, (int64_t{1} << 62) + 12345, std::numeric_limits<int64_t>::max()}) {
    const Permutation order(n, 5, 0);
    std::set<int64_t> values;
    for (int64_t i = 0; i < 1000; ++i) {
      const int64_t value = order(n - 1 - i);
      ASSERT_GE(value, 0);
      ASSERT_LT(value, n);
      values.insert(value);
    }
    EXPECT_EQ(values.size(), 1000u);
  }
}

TEST(Permutation, RefusesWhatIsOutside) {
  EXPECT_THROW(Permutation(0, 1, 1)(0), Error);
  EXPECT_EQ(Permutation(1, 1, 1)(0), 0);
  EXPECT_THROW(Permutation(1, 1, 1)(1), Error);
  EXPECT_THROW(Permutation(5, 1, 1)(-1), Error);
  EXPECT_THROW(Permutation(-1, 1, 1), Error);
}

}  // namespace
}  // namespace biomoe
