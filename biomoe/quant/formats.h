// The 8-bit formats, as one codec for the host and the device: E4M3 and E5M2 elements and E8M0 scales. Every
// rule, with its source, is in docs/numerics.md.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <string_view>

namespace biomoe {

// kE4M3: 4 exponent bits of bias 7, 3 mantissa bits, largest value 448, no infinity, NaN is S.1111.111.
// kE5M2: 5 exponent bits of bias 15, 2 mantissa bits, largest value 57344, infinity and NaN as in IEEE 754.
// (OCP 8-bit Floating Point Specification, OFP8, 1.0.)
enum class Fp8Format : uint8_t { kE4M3, kE5M2 };
inline constexpr std::array<std::string_view, 2> kFp8FormatNames{"E4M3", "E5M2"};

namespace fp8 {

inline constexpr uint8_t kNan = 0x7f;  // what every NaN is encoded as

constexpr int mantissa_bits(Fp8Format format) {
  return format == Fp8Format::kE4M3 ? 3 : 2;
}
constexpr int exponent_bias(Fp8Format format) {
  return format == Fp8Format::kE4M3 ? 7 : 15;
}
constexpr uint32_t largest_code(Fp8Format format) {
  return format == Fp8Format::kE4M3 ? 0x7eu : 0x7bu;
}
constexpr float largest_value(Fp8Format format) {
  return format == Fp8Format::kE4M3 ? 448.0f : 57344.0f;
}

// Round to nearest, ties to even; what is beyond the largest value, infinities included, becomes the largest
// value of its sign; NaN becomes kNan.
constexpr uint8_t encode(float value, Fp8Format format) {
  const int shift = 23 - mantissa_bits(format);
  const uint32_t rebias = static_cast<uint32_t>(127 - exponent_bias(format));
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t half = (1u << (shift - 1)) - 1u;
  const uint32_t normal =
      ((magnitude + half + ((magnitude >> shift) & 1u)) >> shift) - (rebias << mantissa_bits(format));
  // Below the smallest normal the last place is fixed, and the shift grows as the exponent falls; from 25 on
  // everything is rounded to zero.
  const uint32_t exponent = magnitude >> 23;
  const uint32_t wanted = rebias + 1u + static_cast<uint32_t>(shift) - exponent;
  const uint32_t down = exponent > rebias ? 1u : (wanted > 31u ? 31u : wanted);
  const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
  const uint32_t subnormal = (mantissa + ((1u << (down - 1u)) - 1u) + ((mantissa >> down) & 1u)) >> down;
  uint32_t code = exponent > rebias ? normal : subnormal;
  code = code > largest_code(format) ? largest_code(format) : code;
  code |= (bits >> 24) & 0x80u;
  return static_cast<uint8_t>(magnitude > 0x7f800000u ? kNan : code);
}

// Exact.
constexpr float decode(uint8_t code, Fp8Format format) {
  const int bits = mantissa_bits(format);
  const uint32_t magnitude = code & 0x7fu;
  const uint32_t exponent = magnitude >> bits;
  const uint32_t mantissa = magnitude & ((1u << bits) - 1u);
  const float smallest =
      std::bit_cast<float>(static_cast<uint32_t>(128 - exponent_bias(format) - bits) << 23);
  const uint32_t subnormal = std::bit_cast<uint32_t>(static_cast<float>(mantissa) * smallest);
  const uint32_t normal =
      (magnitude << (23 - bits)) + (static_cast<uint32_t>(127 - exponent_bias(format)) << 23);
  uint32_t word = exponent == 0 ? subnormal : normal;
  if (format == Fp8Format::kE4M3) {
    word = magnitude == 0x7fu ? 0x7fc00000u : word;
  } else {
    word = exponent == 31u ? (mantissa == 0 ? 0x7f800000u : 0x7fc00000u) : word;
  }
  return std::bit_cast<float>(word | static_cast<uint32_t>(code & 0x80u) << 24);
}

}  // namespace fp8

// E8M0 (OCP Microscaling Formats, MX, 1.0): byte b is 2^(b - 127), 0xff is NaN.
namespace e8m0 {

inline constexpr uint8_t kNan = 0xff;
inline constexpr uint8_t kLargest = 0xfe;

constexpr float decode(uint8_t scale) {
  if (scale == kNan) return std::bit_cast<float>(0x7fc00000u);
  return std::bit_cast<float>(scale == 0 ? 0x00400000u : static_cast<uint32_t>(scale) << 23);
}

// 1 / decode(scale), exact: 2^-127 is a subnormal number of fp32.
constexpr float reciprocal(uint8_t scale) {
  return decode(scale == kNan ? kNan : static_cast<uint8_t>(kLargest - scale));
}

// The smallest scale that is at least `value` >= 0; the largest for infinity.
constexpr uint8_t round_up(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value) & 0x7fffffffu;
  if (bits > 0x7f800000u) return kNan;
  const uint32_t exponent = bits >> 23;
  const uint32_t mantissa = bits & 0x7fffffu;
  if (exponent == 0) return mantissa > 0x400000u ? 1 : 0;
  if (exponent >= kLargest) return kLargest;
  return static_cast<uint8_t>(exponent + (mantissa > 0 ? 1u : 0u));
}

}  // namespace e8m0

}  // namespace biomoe
