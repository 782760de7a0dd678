// Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
// SC 2011). A value depends on (seed, stream, counter) alone: no state to save, the same on every device and
// at any split.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

namespace biomoe {

// Streams keep the uses of one seed apart.
enum class RngStream : uint32_t { kInit = 1, kShuffle = 2, kReverseComplement = 3, kSample = 4, kTest = 5 };

std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

class Rng {
 public:
  Rng(uint64_t seed, RngStream stream, uint32_t substream = 0)
      : seed_(seed), stream_(static_cast<uint32_t>(stream)), substream_(substream) {}

  std::array<uint32_t, 4> bits(uint64_t counter) const {
    return philox4x32(
        {static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), substream_, stream_},
        {static_cast<uint32_t>(seed_), static_cast<uint32_t>(seed_ >> 32)});
  }
  uint64_t u64(uint64_t counter) const {
    const auto word = bits(counter);
    return static_cast<uint64_t>(word[0]) | static_cast<uint64_t>(word[1]) << 32;
  }
  // Uniform in [0, 1) with 53 bits.
  double uniform(uint64_t counter) const { return static_cast<double>(u64(counter) >> 11) * 0x1p-53; }
  // Standard normal (Box-Muller, in double).
  double normal(uint64_t counter) const {
    const auto word = bits(counter);
    const double u1 = (static_cast<double>(word[0]) + 1.0) * 0x1p-32;  // (0, 1]
    const double u2 = static_cast<double>(word[1]) * 0x1p-32;
    return std::sqrt(-2.0 * std::log(u1)) * std::cos(6.283185307179586476925 * u2);
  }

 private:
  uint64_t seed_;
  uint32_t stream_;
  uint32_t substream_;
};

}  // namespace biomoe
