#include "biomoe/backend/cpu/vector_math.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

namespace biomoe::cpu {
namespace {

void exp_all(const std::vector<float>& x, std::vector<float>& y) {
  const auto count = static_cast<int64_t>(x.size());
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) y[static_cast<size_t>(i)] = exp_f32(x[static_cast<size_t>(i)]);
}

TEST(VectorMath, ExpIsWithinOneAndAHalfUlpOverTheWholeRange) {
  constexpr uint32_t kStride = 1009;  // prime: every 1009th binary32, both signs, every exponent
  std::vector<float> x;
  for (uint64_t bits = 0; bits < 1ull << 32; bits += kStride) {
    const float value = std::bit_cast<float>(static_cast<uint32_t>(bits));
    if (std::abs(value) < 110.0f) x.push_back(value);
  }
  std::vector<float> y(x.size(), -1.0f);
  exp_all(x, y);
  double worst = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double want = std::exp(static_cast<double>(x[i]));
    const auto rounded = static_cast<float>(want);
    if (std::isinf(rounded)) {
      ASSERT_EQ(y[i], rounded) << x[i];
      continue;
    }
    int exponent = 0;
    std::frexp(want, &exponent);
    const double ulp = std::ldexp(1.0, std::max(exponent - 24, -149));
    worst = std::max(worst, std::abs(static_cast<double>(y[i]) - want) / ulp);
  }
  EXPECT_LT(worst, 1.5);
}

TEST(VectorMath, ExpHasExactEnds) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const float kNan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> x{-kInf, kInf, 0.0f, -0.0f, -1e30f, 1e30f, kNan, -kNan, -104.5f};
  std::vector<float> y(x.size(), -1.0f);
  exp_all(x, y);
  EXPECT_EQ(y[0], 0.0f);
  EXPECT_EQ(y[1], kInf);
  EXPECT_EQ(y[2], 1.0f);
  EXPECT_EQ(y[3], 1.0f);
  EXPECT_EQ(y[4], 0.0f);
  EXPECT_EQ(y[5], kInf);
  EXPECT_TRUE(std::isnan(y[6]));
  EXPECT_TRUE(std::isnan(y[7]));
  EXPECT_EQ(y[8], 0.0f);
}

TEST(VectorMath, SigmoidReachesItsEnds) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(sigmoid_f32(kInf), 1.0f);
  EXPECT_EQ(sigmoid_f32(-kInf), 0.0f);
  EXPECT_EQ(sigmoid_f32(0.0f), 0.5f);
  EXPECT_TRUE(std::isnan(sigmoid_f32(std::numeric_limits<float>::quiet_NaN())));
}

}  // namespace
}  // namespace biomoe::cpu
