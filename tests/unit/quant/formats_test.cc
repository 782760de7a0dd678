#include "biomoe/quant/formats.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "biomoe/core/dtype.h"
#include "biomoe/core/rng.h"
#include "biomoe/quant/scaling.h"
#include "tests/ref/fp8.h"

namespace biomoe {
namespace {

const ref::Fp8& reference(Fp8Format format) {
  return format == Fp8Format::kE4M3 ? ref::kE4m3 : ref::kE5m2;
}

class FormatsTest : public testing::TestWithParam<Fp8Format> {
 protected:
  Fp8Format format() const { return GetParam(); }
  // Compares one value, bits of the code and all; gtest's macros are too slow for millions.
  bool agrees(float value) const {
    return fp8::encode(value, format()) == reference(format()).encode(static_cast<double>(value));
  }
};

TEST_P(FormatsTest, EveryCodeIsReadAsTheFormatDefinesIt) {
  for (int code = 0; code < 256; ++code) {
    const float got = fp8::decode(static_cast<uint8_t>(code), format());
    const double want = reference(format()).value(code);
    if (std::isnan(want)) {
      EXPECT_TRUE(std::isnan(got)) << code;
    } else {
      EXPECT_EQ(static_cast<double>(got), want) << code;
      EXPECT_EQ(std::signbit(got), code >= 128) << code;
    }
  }
  EXPECT_EQ(fp8::decode(static_cast<uint8_t>(fp8::largest_code(format())), format()),
            fp8::largest_value(format()));
}

TEST_P(FormatsTest, EveryCodeComesBack) {
  for (int code = 0; code < 256; ++code) {
    const float value = fp8::decode(static_cast<uint8_t>(code), format());
    const uint8_t again = fp8::encode(value, format());
    if (std::isnan(value)) {
      EXPECT_EQ(again, fp8::kNan);
    } else if (std::isinf(value)) {
      EXPECT_EQ(again, fp8::largest_code(format()) | (code & 0x80));
    } else {
      EXPECT_EQ(again, code);
    }
  }
}

TEST_P(FormatsTest, EveryBf16IsRoundedToNearestEven) {
  int wrong = 0;
  for (int bits = 0; bits < 65536; ++bits) {
    const float value = float_from_bf16(static_cast<uint16_t>(bits));
    if (!agrees(value) && wrong++ < 5) ADD_FAILURE() << value;
  }
  EXPECT_EQ(wrong, 0);
}

TEST_P(FormatsTest, TiesAndTheirNeighboursAreRoundedToNearestEven) {
  for (uint32_t code = 0; code <= fp8::largest_code(format()); ++code) {
    const double low = reference(format()).value(static_cast<int>(code));
    // One step above the largest value too, where the next code is none.
    const double step = code < fp8::largest_code(format())
                            ? reference(format()).value(static_cast<int>(code) + 1) - low
                            : low - reference(format()).value(static_cast<int>(code) - 1);
    for (const double at : {low, low + step / 2, low + step}) {
      const auto middle = static_cast<float>(at);
      for (const float value : {middle, std::nextafterf(middle, 0.0f), std::nextafterf(middle, 1e9f)}) {
        EXPECT_TRUE(agrees(value)) << value;
        EXPECT_TRUE(agrees(-value)) << -value;
      }
    }
  }
}

TEST_P(FormatsTest, RandomFp32BitsAreRoundedToNearestEven) {
  const Rng rng(7, RngStream::kTest);
  int wrong = 0;
  for (uint64_t i = 0; i < 250000; ++i) {
    const auto words = rng.bits(i);
    for (const uint32_t word : words) {
      // Any bits, and the same with an exponent in the range of the formats.
      const uint32_t near = (word & 0x807fffffu) | ((100u + (word >> 23) % 48u) << 23);
      for (const uint32_t bits : {word, near}) {
        const float value = std::bit_cast<float>(bits);
        if (!agrees(value) && wrong++ < 5) ADD_FAILURE() << value;
      }
    }
  }
  EXPECT_EQ(wrong, 0);
}

TEST_P(FormatsTest, SpecialValues) {
  EXPECT_EQ(fp8::encode(INFINITY, format()), fp8::largest_code(format()));
  EXPECT_EQ(fp8::encode(-INFINITY, format()), fp8::largest_code(format()) | 0x80);
  EXPECT_EQ(fp8::encode(-0.0f, format()), 0x80);
  EXPECT_EQ(fp8::encode(-NAN, format()), fp8::kNan);
  EXPECT_EQ(fp8::encode(std::bit_cast<float>(0x7f800001u), format()), fp8::kNan);
  EXPECT_EQ(fp8::encode(std::bit_cast<float>(1u), format()), 0);
}

INSTANTIATE_TEST_SUITE_P(Formats, FormatsTest, testing::Values(Fp8Format::kE4M3, Fp8Format::kE5M2),
                         [](const auto& instance) {
                           return std::string(kFp8FormatNames[static_cast<size_t>(instance.param)]);
                         });

TEST(E8m0Test, EveryByteIsAPowerOfTwo) {
  for (int byte = 0; byte < 255; ++byte) {
    const auto scale = static_cast<uint8_t>(byte);
    EXPECT_EQ(static_cast<double>(e8m0::decode(scale)), std::ldexp(1.0, byte - 127));
    EXPECT_EQ(static_cast<double>(e8m0::reciprocal(scale)), std::ldexp(1.0, 127 - byte));
    EXPECT_EQ(e8m0::round_up(e8m0::decode(scale)), scale);
  }
  EXPECT_TRUE(std::isnan(e8m0::decode(0xff)) && std::isnan(e8m0::reciprocal(0xff)));
  EXPECT_EQ(e8m0::round_up(NAN), 0xff);
  EXPECT_EQ(e8m0::round_up(INFINITY), 0xfe);
}

// Every exponent with mantissas around the borders, and all amax that are bf16.
std::vector<float> many_amax() {
  std::vector<float> values;
  for (uint32_t exponent = 0; exponent < 255; ++exponent) {
    for (const uint32_t mantissa :
         {0u, 1u, 0x3fffffu, 0x400000u, 0x400001u, 0x5fffffu, 0x600000u, 0x600001u, 0x7fffffu}) {
      values.push_back(std::bit_cast<float>(exponent << 23 | mantissa));
    }
  }
  for (uint16_t bits = 0; bits <= 0x7f80; ++bits) values.push_back(float_from_bf16(bits));
  return values;
}

class BlockScaleTest : public testing::TestWithParam<Fp8Format> {};

TEST_P(BlockScaleTest, IsThatOfTheReference) {
  const ref::Fp8& format = reference(GetParam());
  for (const float amax : many_amax()) {
    const auto real = static_cast<double>(amax);
    ASSERT_EQ(block_scale(amax, GetParam(), ScaleRule::kMxUp).e8m0, ref::mx_scale_up(real, format)) << amax;
    ASSERT_EQ(block_scale(amax, GetParam(), ScaleRule::kMxFloor).e8m0, ref::mx_scale_floor(real, format))
        << amax;
    for (const bool power_of_two : {false, true}) {
      const ScaleRule rule = power_of_two ? ScaleRule::kPowerOfTwo : ScaleRule::kFloat;
      const BlockScale got = block_scale(amax, GetParam(), rule);
      const double want = ref::float_scale(real, format, power_of_two);
      ASSERT_EQ(static_cast<double>(got.multiply), want) << amax;
      ASSERT_EQ(got.inverse, static_cast<float>(1.0 / want)) << amax;
    }
  }
}

// Rounded up, no element of a block is beyond the largest value.
TEST_P(BlockScaleTest, RoundedUpNothingSaturates) {
  for (const float amax : many_amax()) {
    if (!std::isfinite(amax)) continue;
    const BlockScale scale = block_scale(amax, GetParam(), ScaleRule::kMxUp);
    // t = amax * fp32(1 / largest) may be rounded down onto a power of two: one part in 2^23.
    ASSERT_LE(static_cast<double>(amax * scale.multiply),
              static_cast<double>(fp8::largest_value(GetParam())) * (1 + 0x1p-22))
        << amax;
  }
}

INSTANTIATE_TEST_SUITE_P(Formats, BlockScaleTest, testing::Values(Fp8Format::kE4M3, Fp8Format::kE5M2));

TEST(DelayedScaleTest, FollowsAmaxAndMargin) {
  EXPECT_EQ(delayed_scale(448.0f, 3.0f, Fp8Format::kE4M3, 0, false), 1.0f);
  EXPECT_EQ(delayed_scale(448.0f, 3.0f, Fp8Format::kE4M3, 2, false), 0.25f);
  EXPECT_EQ(delayed_scale(448.0f, 3.0f, Fp8Format::kE4M3, -3, false), 8.0f);
  EXPECT_EQ(delayed_scale(3.0f, 1.0f, Fp8Format::kE5M2, 0, true), 16384.0f);
  for (const float amax : {0.0f, INFINITY, NAN}) {
    EXPECT_EQ(delayed_scale(amax, 3.0f, Fp8Format::kE4M3, 0, false), 3.0f) << amax;
  }
  EXPECT_EQ(delayed_scale(1e-45f, 1.0f, Fp8Format::kE4M3, 0, false), std::numeric_limits<float>::max());
}

}  // namespace
}  // namespace biomoe
