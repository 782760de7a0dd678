// Elementary functions that a compiler turns into vector code inside `#pragma omp simd` loops. Plain C++: no
// intrinsics, no branches, no tables.
#pragma once

#include <bit>
#include <cstdint>

namespace biomoe::cpu {

// e^x within 1.5 units in the last place (measured over every binary32 by tests/ops/vector_math_test.cc),
// with exact ends: -inf and everything below -104 give 0, everything above log(FLT_MAX) gives inf, NaN stays
// NaN, 0 gives 1. Results below FLT_MIN are subnormal unless the processor flushes them.
// Method: Cody and Waite's reduction x = n ln 2 + r, |r| <= ln(2) / 2, and a polynomial for e^r
// (that through the Chebyshev points of (e^r - 1 - r) / r^2).
inline float exp_f32(float x) {
  constexpr float kRound = 0x1.8p23f;  // adding it leaves the nearest integer in the low mantissa bits
  constexpr float kLog2E = 0x1.715476p0f;
  constexpr float kLn2High = 0x1.63p-1f;  // few bits, so that n * kLn2High is exact
  constexpr float kLn2Low = -0x1.bd0106p-13f;
  // The order of operands keeps a NaN, and is that of the minimum and maximum instructions.
  float y = 89.0f < x ? 89.0f : x;
  y = -104.0f > y ? -104.0f : y;
  const float shifted = y * kLog2E + kRound;
  const float n = shifted - kRound;
  float r = y - n * kLn2High;
  r = r - n * kLn2Low;
  float p = 0x1.6d110ap-10f;
  p = p * r + 0x1.120b6ep-7f;
  p = p * r + 0x1.55551ap-5f;
  p = p * r + 0x1.5554dcp-3f;
  p = p * r + 0.5f;
  p = p * (r * r) + r;
  p = p + 1.0f;
  // 2^n as two factors, since n reaches from -150 to 128 and one exponent field does not.
  const auto exponent =
      static_cast<int32_t>(std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(kRound));
  const int32_t half = exponent >> 1;
  const auto rest = static_cast<uint32_t>(exponent) - static_cast<uint32_t>(half);
  const float scale_a = std::bit_cast<float>((static_cast<uint32_t>(half) + 127u) << 23);
  const float scale_b = std::bit_cast<float>((rest + 127u) << 23);
  return p * scale_a * scale_b;
}

// 1 / (1 + e^-x), with the ends 0 and 1 at -inf and inf.
inline float sigmoid_f32(float x) {
  return 1.0f / (1.0f + exp_f32(-x));
}

}  // namespace biomoe::cpu
