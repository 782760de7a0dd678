// From the largest magnitude of a block (amax) to its scale, for the host and the device. Every rule, with
// its source, is in docs/numerics.md.
#pragma once

#include <cstdint>

#include "biomoe/quant/formats.h"

namespace biomoe {

// kMxUp:       E8M0, amax / (largest value) rounded up to a power of two (Transformer Engine)
// kMxFloor:    E8M0, 2^(floor(log2 amax) - (exponent of the largest value)) (OCP MX 1.0)
// kFloat:      fp32, (largest value) / amax
// kPowerOfTwo: the same, rounded down to a power of two
// kGiven:      the scale is an input (delayed scaling)
enum class ScaleRule : uint8_t { kMxUp, kMxFloor, kFloat, kPowerOfTwo, kGiven };

constexpr bool is_mx(ScaleRule rule) {
  return rule == ScaleRule::kMxUp || rule == ScaleRule::kMxFloor;
}

// An element x is stored as encode(x * multiply) and read as decode(code) * inverse.
struct BlockScale {
  float multiply = 1.0f;
  float inverse = 1.0f;
  uint8_t e8m0 = 127;  // MX rules only
};

constexpr BlockScale mx_block_scale(uint8_t scale) {
  return {e8m0::reciprocal(scale), e8m0::decode(scale), scale};
}

constexpr BlockScale given_block_scale(float multiply) {
  return {multiply, 1.0f / multiply, 127};
}

constexpr uint8_t mx_floor_scale(float amax, Fp8Format format) {
  // Exponent fields: of an amax that is subnormal in fp32, 0, which the lower bound covers.
  const int exponent = static_cast<int>(std::bit_cast<uint32_t>(amax) >> 23);
  const int largest = format == Fp8Format::kE4M3 ? 8 : 15;
  if (exponent == 0xff) return e8m0::kLargest;
  return static_cast<uint8_t>(exponent < largest ? 0 : exponent - largest);
}

// fp32 scale of a tensor or block; 1 where amax is 0 or infinite.
constexpr float float_scale(float amax, Fp8Format format, bool power_of_two) {
  constexpr float kLargestFloat = 0x1.fffffep127f;
  if (!(amax > 0.0f) || amax > kLargestFloat) return 1.0f;
  float scale = fp8::largest_value(format) / amax;
  scale = scale > kLargestFloat ? kLargestFloat : scale;
  return power_of_two ? std::bit_cast<float>(std::bit_cast<uint32_t>(scale) & 0xff800000u) : scale;
}

// For every rule but kGiven. `amax` is the largest magnitude that is not NaN, 0 where there is none.
constexpr BlockScale block_scale(float amax, Fp8Format format, ScaleRule rule) {
  switch (rule) {
    case ScaleRule::kMxUp:
      return mx_block_scale(e8m0::round_up(amax * (1.0f / fp8::largest_value(format))));
    case ScaleRule::kMxFloor:
      return mx_block_scale(mx_floor_scale(amax, format));
    default:
      return given_block_scale(float_scale(amax, format, rule == ScaleRule::kPowerOfTwo));
  }
}

// The next scale of delayed scaling: (largest value) 2^-margin / amax; as it was where amax is 0 or not
// finite.
constexpr float delayed_scale(float amax, float scale, Fp8Format format, int margin, bool power_of_two) {
  constexpr float kLargestFloat = 0x1.fffffep127f;
  if (!(amax > 0.0f) || amax > kLargestFloat) return scale;
  const float two_to_margin = std::bit_cast<float>(static_cast<uint32_t>(127 - margin) << 23);
  float next = fp8::largest_value(format) * two_to_margin / amax;
  next = next > kLargestFloat ? kLargestFloat : next;
  return power_of_two ? std::bit_cast<float>(std::bit_cast<uint32_t>(next) & 0xff800000u) : next;
}

}  // namespace biomoe
