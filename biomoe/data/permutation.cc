#include "biomoe/data/permutation.h"

#include <algorithm>
#include <bit>

#include "biomoe/core/error.h"

namespace biomoe {

Permutation::Permutation(int64_t n, uint64_t seed, uint32_t epoch)
    : n_(static_cast<uint64_t>(n)), rng_(seed, RngStream::kShuffle, epoch) {
  BM_CHECK(n >= 0, "a permutation of {} elements", n);
  const int bits = n_ <= 1 ? 0 : std::bit_width(n_ - 1);
  half_bits_ = std::max((bits + 1) / 2, 1);
}

uint64_t Permutation::encrypt(uint64_t value) const {
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  uint64_t left = value >> half_bits_;
  uint64_t right = value & mask;
  for (uint32_t round = 0; round < kRounds; ++round) {
    const uint64_t mixed = left ^ (rng_.u64(right | uint64_t{round} << 32) & mask);
    left = right;
    right = mixed;
  }
  return left << half_bits_ | right;
}

int64_t Permutation::operator()(int64_t index) const {
  auto value = static_cast<uint64_t>(index);
  BM_CHECK(index >= 0 && value < n_, "element {} of a permutation of {}", index, n_);
  if (n_ == 1) return 0;
  do {
    value = encrypt(value);
  } while (value >= n_);
  return static_cast<int64_t>(value);
}

}  // namespace biomoe
