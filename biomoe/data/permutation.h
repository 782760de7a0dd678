// A pseudo-random permutation of [0, n) that needs no table: the shuffle of all windows of an epoch.
#pragma once

#include <cstdint>

#include "biomoe/core/rng.h"

namespace biomoe {

// A balanced Feistel network (Luby and Rackoff 1988) over the smallest even number of bits that holds n, with
// Philox as the round function, walked until it lands inside [0, n) again (Black and Rogaway, "Ciphers with
// arbitrary finite domains", 2002): the domain is less than 4n, so 4 steps are expected at most.
class Permutation {
 public:
  // 0 <= n <= 2^63 - 1. Each (seed, epoch) gives a permutation of its own.
  Permutation(int64_t n, uint64_t seed, uint32_t epoch);

  int64_t size() const { return static_cast<int64_t>(n_); }
  int64_t operator()(int64_t index) const;  // index in [0, n), else throws

 private:
  static constexpr uint32_t kRounds = 8;
  uint64_t encrypt(uint64_t value) const;

  uint64_t n_;
  int half_bits_;
  Rng rng_;
};

}  // namespace biomoe
