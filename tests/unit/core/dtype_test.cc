#include "biomoe/core/dtype.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "biomoe/core/error.h"
#include "biomoe/core/rng.h"

namespace biomoe {
namespace {

// A 16-bit format, described by its fields alone: the reference that the conversions are held against.
struct Format {
  int mantissa_bits;
  int bias;
  int max_exponent;  // the exponent field of infinity and NaN
};
constexpr Format kF16{10, 15, 31};
constexpr Format kBF16{7, 127, 255};

// The value of a code point; exact in double for both formats.
double decode(uint16_t bits, const Format& format) {
  const int exponent = (bits & 0x7fff) >> format.mantissa_bits;
  const int mantissa = bits & ((1 << format.mantissa_bits) - 1);
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (exponent == format.max_exponent) {
    return mantissa ? std::nan("") : sign * std::numeric_limits<double>::infinity();
  }
  const int scale = std::max(exponent, 1) - format.bias - format.mantissa_bits;
  return sign * std::ldexp(mantissa + (exponent ? 1 << format.mantissa_bits : 0), scale);
}

// The code point nearest to `value` by its definition: nearest, ties to the even mantissa, beyond the largest
// finite value plus half a unit to infinity.
uint16_t encode(float value, const Format& format) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::abs(static_cast<double>(value));
  uint16_t low = 0;
  auto high = static_cast<uint16_t>(format.max_exponent << format.mantissa_bits);  // infinity
  const auto limit = [&](uint16_t bits) {  // infinity counts as the next power of two
    return bits == format.max_exponent << format.mantissa_bits
               ? std::ldexp(1.0, format.max_exponent - format.bias)
               : decode(bits, format);
  };
  if (magnitude >= limit(high)) return sign | high;
  while (high - low > 1) {
    const auto middle = static_cast<uint16_t>((low + high) / 2);
    (limit(middle) <= magnitude ? low : high) = middle;
  }
  const double below = magnitude - limit(low), above = limit(high) - magnitude;
  const bool up = above < below || (above == below && (high & 1) == 0);
  return sign | (up ? high : low);
}

template <typename ToFloat, typename FromFloat>
void check_every_code_point(const Format& format, ToFloat to_float, FromFloat from_float) {
  for (int code = 0; code < 0x10000; ++code) {
    const auto bits = static_cast<uint16_t>(code);
    const float value = to_float(bits);
    const double expected = decode(bits, format);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(value)) << code;
      ASSERT_EQ(std::signbit(value), (bits & 0x8000) != 0) << code;
      ASSERT_TRUE(std::isnan(to_float(from_float(value)))) << code;
      continue;
    }
    ASSERT_EQ(static_cast<double>(value), expected) << code;
    ASSERT_EQ(std::signbit(value), (bits & 0x8000) != 0) << code;
    ASSERT_EQ(from_float(value), bits) << code;
  }
}

// The values where rounding decides: each code point, the middle to the next one, and their neighbours.
template <typename ToFloat, typename FromFloat>
void check_rounding(const Format& format, ToFloat to_float, FromFloat from_float) {
  const float infinity = std::numeric_limits<float>::infinity();
  const int last = (format.max_exponent << format.mantissa_bits) - 1;
  for (int code = 0; code <= last; ++code) {
    const float value = to_float(static_cast<uint16_t>(code));
    const float next = code < last ? to_float(static_cast<uint16_t>(code + 1)) : infinity;
    const float middle = code < last ? value + (next - value) / 2 : value + (value - to_float(last - 1)) / 2;
    for (const float centre : {value, middle}) {
      for (const float at : {centre, std::nextafter(centre, 0.0f), std::nextafter(centre, infinity)}) {
        ASSERT_EQ(from_float(at), encode(at, format)) << at;
        ASSERT_EQ(from_float(-at), encode(-at, format)) << -at;
      }
    }
  }
  const Rng rng(3, RngStream::kTest);
  for (uint64_t i = 0; i < 200'000; ++i) {
    const float at = std::bit_cast<float>(static_cast<uint32_t>(rng.u64(i)));
    if (!std::isnan(at)) {
      ASSERT_EQ(from_float(at), encode(at, format)) << at;
    }
  }
}

TEST(DType, Bfloat16EveryCodePoint) {
  check_every_code_point(kBF16, float_from_bf16, bf16_from_float);
}
TEST(DType, Float16EveryCodePoint) {
  check_every_code_point(kF16, float_from_f16, f16_from_float);
}
TEST(DType, Bfloat16Rounding) {
  check_rounding(kBF16, float_from_bf16, bf16_from_float);
}
TEST(DType, Float16Rounding) {
  check_rounding(kF16, float_from_f16, f16_from_float);
}

TEST(DType, NanStaysNanWhateverItsPayload) {
  for (int shift = 0; shift < 23; ++shift) {
    for (const uint32_t sign : {0u, 0x80000000u}) {
      const float nan = std::bit_cast<float>(sign | 0x7f800000u | 1u << shift);
      EXPECT_TRUE(std::isnan(float_from_bf16(bf16_from_float(nan)))) << shift;
      EXPECT_TRUE(std::isnan(float_from_f16(f16_from_float(nan)))) << shift;
    }
  }
}

TEST(DType, SizesAndNames) {
  EXPECT_EQ(dtype_size(DType::kF32), 4u);
  EXPECT_EQ(dtype_size(DType::kBF16), 2u);
  EXPECT_EQ(dtype_size(DType::kF16), 2u);
  EXPECT_EQ(dtype_size(DType::kF64), 8u);
  EXPECT_EQ(dtype_size(DType::kI32), 4u);
  EXPECT_EQ(dtype_size(DType::kI64), 8u);
  EXPECT_EQ(dtype_size(DType::kU8), 1u);
  EXPECT_EQ(dtype_name(DType::kBF16), "BF16");
  EXPECT_EQ(dtype_name(DType::kI64), "I64");
  EXPECT_THROW(dtype_size(static_cast<DType>(99)), Error);
  EXPECT_THROW(dtype_name(static_cast<DType>(99)), Error);
}

}  // namespace
}  // namespace biomoe
