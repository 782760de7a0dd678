// The 8-bit formats in double precision, from tables of all values: nothing here is shared with the library.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace biomoe::ref {

struct Fp8 {
  int exponent_bits, mantissa_bits, bias;
  int largest_code;
  bool has_infinity;

  double value(int code) const {
    const int magnitude = code & 0x7f;
    const int exponent = magnitude >> mantissa_bits, mantissa = magnitude & ((1 << mantissa_bits) - 1);
    const double sign = code & 0x80 ? -1.0 : 1.0;
    if (magnitude > largest_code) {
      const bool infinite = has_infinity && mantissa == 0;
      return infinite ? sign * std::numeric_limits<double>::infinity() : std::nan("");
    }
    const double steps = exponent == 0 ? mantissa : mantissa + (1 << mantissa_bits);
    return sign * std::ldexp(steps, std::max(exponent, 1) - bias - mantissa_bits);
  }
  double largest() const { return value(largest_code); }

  // The nearest value; of two as near the one with the even code; beyond the largest, the largest.
  int encode(double x) const {
    if (std::isnan(x)) return 0x7f;
    const int sign = std::signbit(x) ? 0x80 : 0;
    const double magnitude = std::abs(x);
    if (magnitude >= largest()) return sign | largest_code;
    int low = 0, high = largest_code;  // value(low) <= magnitude < value(high)
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (value(middle) <= magnitude ? low : high) = middle;
    }
    const double below = magnitude - value(low), above = value(high) - magnitude;
    return sign | (below < above || (below == above && low % 2 == 0) ? low : high);
  }
};

inline const Fp8 kE4m3{4, 3, 7, 0x7e, false};
inline const Fp8 kE5m2{5, 2, 15, 0x7b, true};

// Scales of a block whose largest magnitude, NaN aside, is amax.
inline int mx_scale_up(double amax, const Fp8& format) {
  if (std::isinf(amax)) return 254;
  const double target = static_cast<double>(
      static_cast<float>(amax * static_cast<double>(static_cast<float>(1.0 / format.largest()))));
  for (int scale = 0; scale < 254; ++scale) {
    if (std::ldexp(1.0, scale - 127) >= target) return scale;
  }
  return 254;
}
inline int mx_scale_floor(double amax, const Fp8& format) {
  if (std::isinf(amax)) return 254;
  if (amax == 0) return 0;
  const int emax = std::ilogb(format.largest());
  return std::clamp(std::ilogb(amax) - emax + 127, 0, 254);
}
// What elements are multiplied with.
inline double float_scale(double amax, const Fp8& format, bool power_of_two) {
  if (amax == 0 || std::isinf(amax)) return 1.0;
  const double limit = std::numeric_limits<float>::max();
  double scale = std::min(format.largest() / amax, limit);
  scale = static_cast<double>(static_cast<float>(scale));
  return power_of_two ? std::ldexp(1.0, std::ilogb(scale)) : scale;
}

// x * y as fp32 has it.
inline double fp32_product(double x, double y) {
  return static_cast<double>(static_cast<float>(x * y));
}

// The largest magnitude of what is not NaN.
inline double amax_of(const std::vector<double>& values) {
  double amax = 0;
  for (const double value : values) {
    if (!std::isnan(value)) amax = std::max(amax, std::abs(value));
  }
  return amax;
}

}  // namespace biomoe::ref
