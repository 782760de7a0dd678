// Where the MXFP8 products of sm_100a look for an expert's part, without a GPU: a product that reads codes
// and scales from where it is told, against the reference on what they stand for.
#include "biomoe/backend/cuda/gemm/sm100_mxfp8_problem.h"

#include <gtest/gtest.h>

#include <numeric>

#include "tests/ops/op_test.h"
#include "tests/ref/grouped_gemm.h"
#include "tests/ref/quantize.h"

namespace biomoe::cuda::sm100 {
namespace {

using ref::Vector;

struct Case {
  std::vector<int64_t> offsets;
  int64_t capacity, in, out;
};

void PrintTo(const Case& c, std::ostream* to) {
  *to << testing::PrintToString(c.offsets) << " of " << c.capacity << " rows, " << c.in << " -> " << c.out;
}

Vector normals(uint64_t seed, int64_t count) {
  const Rng rng(seed, RngStream::kTest);
  Vector values;
  for (int64_t i = 0; i < count; ++i) {
    values.push_back(static_cast<double>(static_cast<float>(rng.normal(static_cast<uint64_t>(i)))));
  }
  return values;
}

// [groups, rows, columns] to [groups, columns, rows].
Vector transposed(const Vector& x, int64_t groups, int64_t rows, int64_t columns) {
  Vector y(x.size());
  for (int64_t i = 0; i < groups * rows * columns; ++i) {
    const int64_t g = i / (rows * columns), r = i / columns % rows, c = i % columns;
    y[static_cast<size_t>((g * columns + c) * rows + r)] = x[static_cast<size_t>(i)];
  }
  return y;
}

// An operand [groups, rows, columns] whose sums run along columns; rows and columns that are not used are
// poison: NaN codes, and scales of NaN.
struct Operand {
  std::vector<uint8_t> codes, scales;
  Vector values;
};

// `used` of the rows (by_column: of the columns) of the one group that has spare ones.
Operand operand(const Vector& x, int64_t groups, int64_t rows, int64_t columns, int64_t used,
                bool by_column) {
  Operand to;
  for (int64_t g = 0; g < groups; ++g) {
    const auto begin = x.begin() + g * rows * columns;
    const Vector part(begin, begin + rows * columns);
    const ref::Quantized quantized =
        ref::quantize(part, {rows, columns, {0, rows}, false, Fp8Format::kE4M3, ScaleRule::kMxUp, {1, 32}});
    to.values.insert(to.values.end(), quantized.values.begin(), quantized.values.end());
    // The padding of the layout is 0, as the tensor cores read it.
    const int64_t blocks = (columns + 31) / 32, row_tiles = (rows + 127) / 128,
                  block_tiles = (blocks + 3) / 4;
    std::vector<uint8_t> scales(static_cast<size_t>(row_tiles * block_tiles * 512), 0);
    for (int64_t i = 0; i < rows * columns; ++i) {
      const int64_t r = i / columns, c = i % columns, b = c / 32;
      const bool poison = (by_column ? c : r) >= used;
      to.codes.push_back(poison ? uint8_t{0x7f} : quantized.codes[static_cast<size_t>(i)]);
      const int64_t at = (r / 128 * block_tiles + b / 4) * 512 + r % 32 * 16 + r % 128 / 32 * 4 + b % 4;
      scales[static_cast<size_t>(at)] =
          poison ? uint8_t{0xff}
                 : static_cast<uint8_t>(quantized.scales[static_cast<size_t>(r * blocks + b)]);
    }
    to.scales.insert(to.scales.end(), scales.begin(), scales.end());
  }
  return to;
}

double value(const Operand& of, int64_t code, int64_t scale) {
  return ref::kE4m3.value(of.codes.at(static_cast<size_t>(code))) *
         std::ldexp(1.0, of.scales.at(static_cast<size_t>(scale)) - 127);
}

// Tile by tile from where `part` says; rows of the output that it does not name stay as they are.
void multiply(const ExpertProduct& part, const Operand& a, const Operand& b, Vector& d) {
  const auto scale = [](int64_t base, int64_t tile_stride, int64_t row, int64_t k) {
    const int64_t block = k / 32;
    return base + row / 128 * tile_stride + block / 4 * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4;
  };
  for (int64_t m = 0; m < part.m; ++m) {
    for (int64_t n = 0; n < part.n; ++n) {
      double sum = 0;
      for (int64_t k = 0; k < part.k; ++k) {
        sum += value(a, part.a_codes + m * part.a_stride + k,
                     scale(part.a_scales, part.a_scale_tile_stride, m, k)) *
               value(b, part.b_codes + n * part.b_stride + k,
                     scale(part.b_scales, part.b_scale_tile_stride, n, k));
      }
      d.at(static_cast<size_t>(part.d + m * part.d_stride + n)) = sum;
    }
  }
}

class ExpertProductTest : public testing::TestWithParam<Case> {
 protected:
  int64_t experts() const { return static_cast<int64_t>(GetParam().offsets.size()) - 1; }
  int64_t used() const { return GetParam().offsets.back(); }

  void run(const GroupedProduct& product, const Operand& a, const Operand& b, Vector& d) const {
    for (int64_t e = 0; e < experts(); ++e) {
      const auto& offsets = GetParam().offsets;
      multiply(
          expert_product(product, e, offsets[static_cast<size_t>(e)], offsets[static_cast<size_t>(e) + 1]), a,
          b, d);
    }
  }

  static void expect_near(const Vector& got, Vector want, const char* what) {
    want.resize(got.size(), -7.0);  // what no expert has stays as it was
    EXPECT_LT(test::unit_error(got, want), 1e-12) << what;
  }
};

TEST_P(ExpertProductTest, ForwardAndActivationGradient) {
  const auto& [offsets, capacity, in, out] = GetParam();
  const ref::ExpertSizes sizes{in, out, offsets};
  for (const bool dgrad : {false, true}) {
    const int64_t n = dgrad ? in : out, k = dgrad ? out : in;
    Vector w = normals(1, experts() * out * in);
    if (dgrad) w = transposed(w, experts(), out, in);
    const Operand a = operand(normals(2, capacity * k), 1, capacity, k, used(), false);
    const Operand b = operand(w, experts(), n, k, n, false);
    Vector d(static_cast<size_t>(capacity * n), -7.0);
    run({.experts = static_cast<int>(experts()), .capacity = capacity, .n = n, .k = k}, a, b, d);
    const Vector weights = dgrad ? transposed(b.values, experts(), in, out) : b.values;
    expect_near(
        d,
        dgrad ? ref::grouped_dgrad(sizes, a.values, weights) : ref::grouped_forward(sizes, a.values, weights),
        dgrad ? "activation gradient" : "forward");
  }
}

TEST_P(ExpertProductTest, WeightGradient) {
  const auto& [offsets, capacity, in, out] = GetParam();
  const Operand a = operand(normals(3, out * capacity), 1, out, capacity, used(), true);
  const Operand b = operand(normals(4, in * capacity), 1, in, capacity, used(), true);
  Vector d(static_cast<size_t>(experts() * out * in), 0.0);  // experts without rows are cleared beside it
  run({.segments = SegmentAxis::kSums,
       .experts = static_cast<int>(experts()),
       .capacity = capacity,
       .m = out,
       .n = in},
      a, b, d);
  expect_near(d,
              ref::grouped_wgrad({in, out, offsets}, transposed(a.values, 1, out, capacity),
                                 transposed(b.values, 1, in, capacity),
                                 Vector(static_cast<size_t>(experts() * out * in), 0.0)),
              "weight gradient");
}

INSTANTIATE_TEST_SUITE_P(Cases, ExpertProductTest,
                         testing::Values(Case{{0, 128}, 128, 32, 32}, Case{{0, 256, 256, 384}, 512, 160, 96},
                                         Case{{0, 0, 128, 128}, 256, 64, 288},
                                         Case{{0, 128, 384}, 384, 288, 160}));

// Without experts: all rows, however many; no segment has to end at a multiple of 128.
TEST(ExpertProduct, OfAllRows) {
  const GroupedProduct rows{.experts = 1, .capacity = 48, .n = 64, .k = 96};
  const ExpertProduct forward = expert_product(rows, 0, 0, 48);
  EXPECT_EQ(forward.m, 48);
  EXPECT_EQ(forward.a_scale_tile_stride, 512);  // three blocks, padded to four
  const GroupedProduct sums{.segments = SegmentAxis::kSums, .experts = 1, .capacity = 48, .m = 160, .n = 64};
  const ExpertProduct gradient = expert_product(sums, 0, 0, 48);
  EXPECT_EQ(gradient.k, 48);
  EXPECT_EQ(gradient.a_stride, 48);
  EXPECT_EQ(gradient.d_stride, 64);
}

// CUTLASS is given no product of no terms.
TEST(ExpertProduct, WithoutRowsHasNoExtent) {
  const GroupedProduct sums{.segments = SegmentAxis::kSums, .experts = 2, .capacity = 256, .m = 64, .n = 64};
  EXPECT_EQ(expert_product(sums, 1, 128, 128).m, 0);
  EXPECT_EQ(expert_product(sums, 1, 128, 256).m, 64);
  EXPECT_EQ(expert_product({.experts = 2, .capacity = 256, .n = 64, .k = 64}, 1, 128, 128).m, 0);
}

// At the sizes of Mixtral 8x7B offsets pass 2^31.
TEST(ExpertProduct, OffsetsAre64Bit) {
  const GroupedProduct rows{.experts = 8, .capacity = 1 << 20, .n = 28672, .k = 4096};
  const ExpertProduct last = expert_product(rows, 7, 1 << 19, 1 << 20);
  EXPECT_EQ(last.a_codes, int64_t{1} << 31);
  EXPECT_EQ(last.d, (int64_t{1} << 19) * 28672);
  EXPECT_EQ(last.b_scales, 7 * (int64_t{28672} * 4096 / 32));
  EXPECT_EQ(last.a_scales, (int64_t{1} << 31) / 32);
}

TEST(ExpertProduct, SizesSupported) {
  const int64_t offsets[3] = {0, 0, 0};
  const GroupedProduct good{.experts = 2, .capacity = 256, .offsets = offsets, .n = 64, .k = 96};
  EXPECT_TRUE(sizes_supported(good));
  const auto refused = [&](auto change) {
    GroupedProduct product = good;
    change(product);
    return !sizes_supported(product);
  };
  EXPECT_TRUE(refused([](GroupedProduct& p) { p.n = 80; }));
  EXPECT_TRUE(refused([](GroupedProduct& p) { p.k = 0; }));
  EXPECT_TRUE(refused([](GroupedProduct& p) { p.experts = kMaxExperts + 1; }));
  EXPECT_TRUE(refused([](GroupedProduct& p) { p.capacity = int64_t{1} << 31; }));
  EXPECT_TRUE(refused([](GroupedProduct& p) { p.offsets = nullptr; }));
  GroupedProduct sums{
      .segments = SegmentAxis::kSums, .experts = 1, .capacity = 48, .m = 64, .n = 64};  // all rows, 48
  EXPECT_TRUE(sizes_supported(sums));
  sums.capacity = 40;
  EXPECT_FALSE(sizes_supported(sums));
  sums.capacity = 48;
  sums.m = 0;
  EXPECT_FALSE(sizes_supported(sums));
}

}  // namespace
}  // namespace biomoe::cuda::sm100
