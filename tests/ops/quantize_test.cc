#include "biomoe/ops/quantize.h"

#include "tests/ops/op_test.h"
#include "tests/ops/quantize_cases.h"

namespace biomoe::test {
namespace {

// -1 where the float is the poison that nothing was written over.
double value_or_poison(float value) {
  return std::bit_cast<uint32_t>(value) == 0xffffffffu ? -1.0 : static_cast<double>(value);
}

bool same(double a, double b) {
  return std::isnan(a) ? std::isnan(b) : a == b && std::signbit(a) == std::signbit(b);
}

class QuantizeTest : public testing::TestWithParam<QuantizeCase> {};

TEST_P(QuantizeTest, IsThatOfTheReferenceInEveryByte) {
  const QuantizeCase& c = GetParam();
  const std::vector<double> source = ref::difficult_values(c.rows, c.columns, 3);
  Tensor<float> x(Shape{c.rows, c.columns}, 5);
  x.set(source);
  for (const QuantizeVariant& variant : quantize_variants()) {
    const ref::QuantizeProblem problem = problem_of(c, variant);
    const ref::Quantized want = ref::quantize(source, problem);
    const auto label = testing::Message()
                       << variant.block.rows << "x" << variant.block.columns << " rule "
                       << static_cast<int>(variant.rule) << " format " << static_cast<int>(variant.format);
    SCOPED_TRACE(label);
    for (const int threads : {1, 3}) {
      TestContext ctx(threads);
      Tensor<int64_t> offsets(Shape{static_cast<int64_t>(c.offsets.size())});
      offsets.set({c.offsets.begin(), c.offsets.end()});
      Tensor<float> given(Shape{static_cast<int64_t>(problem.given.size())});
      given.set(problem.given);
      Tensor<float> y(x.shape(), 2);
      std::vector<uint8_t> data(source.size() + 1, 0xff), bytes(want.scales.size() + 1, 0xff);
      Tensor<float> scales(Shape{static_cast<int64_t>(want.scales.size())}), amax(scales.shape());
      amax.fill(0);
      QuantizeArgs args{.x_RC = x.view(),
                        .format = variant.format,
                        .rule = variant.rule,
                        .block = variant.block,
                        .group_rows = c.group_rows};
      if (!c.offsets.empty()) args.offsets_E1 = offsets.view();
      const BlockGrid grid = block_grid(args);
      const Shape blocks{grid.bands(), grid.block_columns()};
      args.data_RC = TensorView(data.data(), DType::kU8, x.shape());
      args.scales_NB = is_mx(variant.rule) ? TensorView(bytes.data(), DType::kU8, blocks)
                                           : TensorView(scales.view().data, DType::kF32, blocks);
      args.amax_NB = TensorView(amax.view().data, DType::kF32, blocks);
      args.dequantized_RC = y.view();
      if (variant.rule == ScaleRule::kGiven) args.given_scales_N = given.view();
      Tensor<float> row_scales(Shape{grid.block_columns(), row_scales_stride(c.rows)});
      std::vector<uint8_t> transposed(source.size() + 1, 0xff);
      const int64_t group_rows = c.group_rows > 0 ? c.group_rows : c.rows;
      if (has_row_scales(variant)) args.row_scales_BR = row_scales.view();
      if (has_transposed(c, variant)) {
        args.transposed_CR =
            TensorView(transposed.data(), DType::kU8, Shape{grid.groups * c.columns, group_rows});
      }
      quantize(*ctx, args);
      EXPECT_TRUE(std::equal(want.codes.begin(), want.codes.end(), data.begin()));
      EXPECT_EQ(data.back(), 0xff);
      EXPECT_EQ(amax.values(), want.amax);
      const int64_t used = problem.offsets.back();
      for (int64_t i = 0; has_transposed(c, variant) && i < c.rows * c.columns; ++i) {
        const int64_t row = i / c.columns, group = row / group_rows;
        const int64_t at = (group * c.columns + i % c.columns) * group_rows + row % group_rows;
        ASSERT_EQ(transposed[static_cast<size_t>(at)], want.codes[static_cast<size_t>(i)]) << "element " << i;
      }
      EXPECT_EQ(transposed.back(), 0xff);
      for (int64_t r = 0; has_row_scales(variant) && r < row_scales.shape()[1]; ++r) {
        for (int64_t b = 0; b < grid.block_columns(); ++b) {
          const auto band = static_cast<size_t>(grid.grouped() && r < used ? r + grid.group_of_row(r) : r);
          const double expected =
              r < used
                  ? want.scales[band * static_cast<size_t>(grid.block_columns()) + static_cast<size_t>(b)]
                  : -1.0;
          ASSERT_EQ(value_or_poison(row_scales.at(b, r)), expected) << "row " << r << " block " << b;
        }
      }
      for (int64_t i = 0; i < used * c.columns; ++i) {
        ASSERT_TRUE(same(static_cast<double>(y.at(i / c.columns, i % c.columns)),
                         want.values[static_cast<size_t>(i)]))
            << "element " << i;
      }
      for (int64_t r = used; r < c.rows; ++r) ASSERT_EQ(value_or_poison(y.at(r, 0)), -1.0);
      EXPECT_TRUE(y.padding_untouched());
      for (size_t i = 0; i < want.scales.size(); ++i) {
        const double got = is_mx(variant.rule) ? (bytes[i] == 0xff ? -1.0 : static_cast<double>(bytes[i]))
                                               : value_or_poison(scales.at(static_cast<int64_t>(i)));
        ASSERT_EQ(got, want.scales[i]) << "scale " << i;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, QuantizeTest, testing::ValuesIn(kQuantizeCases));

class ColumnQuantizeTest : public testing::TestWithParam<QuantizeCase> {};

TEST_P(ColumnQuantizeTest, IsThatOfBlocksOfOneColumnInEveryByte) {
  const QuantizeCase& c = GetParam();
  const auto elements = static_cast<size_t>(c.rows * c.columns);
  Tensor<float> x(Shape{c.rows, c.columns}, 4);
  x.set(padded_values(c));
  Tensor<int64_t> offsets(Shape{static_cast<int64_t>(c.offsets.size())});
  offsets.set({c.offsets.begin(), c.offsets.end()});
  const int64_t used = c.offsets.empty() ? c.rows : c.offsets.back(), bands = (c.rows + 127) / 128;
  for (const ScaleRule rule : {ScaleRule::kFloat, ScaleRule::kPowerOfTwo}) {
    for (const Fp8Format format : {Fp8Format::kE4M3, Fp8Format::kE5M2}) {
      TestContext ctx(3);
      QuantizeArgs args{.x_RC = x.view(), .format = format, .rule = rule, .group_rows = c.group_rows};
      if (!c.offsets.empty()) args.offsets_E1 = offsets.view();

      // By itself, each of the two.
      std::vector<uint8_t> row_codes(elements + 1, 0xff), column_codes(elements + 1, 0xff);
      Tensor<float> row_scales(Shape{c.columns / 128, row_scales_stride(c.rows)});
      QuantizeArgs by_row = args, by_column = args;
      by_row.block = {1, 128};
      by_row.data_RC = TensorView(row_codes.data(), DType::kU8, x.shape());
      by_row.row_scales_BR = row_scales.view();
      quantize(*ctx, by_row);
      by_column.block = {128, 1};
      by_column.data_RC = TensorView(column_codes.data(), DType::kU8, x.shape());
      const BlockGrid grid = block_grid(by_column);
      Tensor<float> column_scales(Shape{grid.bands(), grid.block_columns()});
      by_column.scales_NB = column_scales.view();
      quantize(*ctx, by_column);

      for (const bool with_rows : {true, false}) {
        std::vector<uint8_t> data(elements + 1, 0xff), transposed(elements + 1, 0xff);
        Tensor<float> data_scales(row_scales.shape()), scales(Shape{bands, c.columns});
        QuantizeArgs both = args;
        both.block = {1, 128};
        both.column_codes_CR = TensorView(transposed.data(), DType::kU8, Shape{c.columns, c.rows});
        both.column_scales_BC = scales.view();
        if (with_rows) {
          both.data_RC = TensorView(data.data(), DType::kU8, x.shape());
          both.row_scales_BR = data_scales.view();
        }
        quantize(*ctx, both);
        if (with_rows) {
          EXPECT_EQ(data, row_codes);
          EXPECT_TRUE(data_scales.same_bits(row_scales));
        }
        for (int64_t i = 0; i < c.rows * c.columns; ++i) {
          const int64_t r = i / c.columns, column = i % c.columns;
          ASSERT_EQ(transposed[static_cast<size_t>(column * c.rows + r)],
                    column_codes[static_cast<size_t>(i)])
              << "row " << r << " column " << column;
          const int64_t band = r < used && grid.grouped() ? r / 128 + grid.group_of_row(r) : r / 128;
          ASSERT_EQ(value_or_poison(scales.at(r / 128, column)),
                    r / 128 * 128 < used ? value_or_poison(column_scales.at(band, column)) : -1.0)
              << "row " << r << " column " << column;
        }
        EXPECT_EQ(transposed.back(), 0xff);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, ColumnQuantizeTest, testing::ValuesIn(kColumnCases));

// Values that stand for codes already quantise to themselves: a second pass changes nothing.
TEST(QuantizeTest, TwiceIsOnce) {
  TestContext ctx(1);
  for (const QuantizeVariant& variant : quantize_variants()) {
    if (variant.rule == ScaleRule::kGiven || variant.rule == ScaleRule::kFloat) continue;
    if (variant.rule == ScaleRule::kMxFloor) continue;  // saturated values have another amax
    Tensor<float> x(Shape{64, 160}), once(x.shape()), twice(x.shape());
    x.fill_normal(5);
    QuantizeArgs args{.x_RC = x.view(),
                      .format = variant.format,
                      .rule = variant.rule,
                      .block = variant.block,
                      .dequantized_RC = once.view()};
    quantize(*ctx, args);
    args.x_RC = once.view();
    args.dequantized_RC = twice.view();
    quantize(*ctx, args);
    EXPECT_TRUE(once.same_bits(twice)) << static_cast<int>(variant.rule);
    EXPECT_FALSE(once.same_bits(x));
    args.x_RC = args.dequantized_RC = x.view();  // in place
    quantize(*ctx, args);
    EXPECT_TRUE(once.same_bits(x));
  }
}

TEST(QuantizeTest, RefusesWhatItHasNoKernelFor) {
  TestContext ctx(1);
  Tensor<float> x(Shape{6, 32}), scales(Shape{6, 1});
  EXPECT_THROW(quantize(*ctx, {.x_RC = x.view(), .block = {2, 16}}), Error);
  EXPECT_THROW(quantize(*ctx, {.x_RC = x.view(), .group_rows = 4}), Error);
  EXPECT_THROW(quantize(*ctx, {.x_RC = x.view(), .scales_NB = scales.view()}), Error);  // F32, not U8
  Tensor<float> row_scales(Shape{1, 8});
  EXPECT_THROW(quantize(*ctx, {.x_RC = x.view(), .row_scales_BR = row_scales.view()}), Error);  // an MX rule
  EXPECT_THROW(quantize(*ctx, {.x_RC = x.view(),
                               .rule = ScaleRule::kFloat,
                               .block = {128, 1},
                               .row_scales_BR = row_scales.view()}),
               Error);
  std::vector<uint8_t> codes(6 * 32);
  EXPECT_THROW(quantize(*ctx, {.x_RC = x.view(),
                               .rule = ScaleRule::kFloat,
                               .block = {1, 128},
                               .transposed_CR = TensorView(codes.data(), DType::kU8, Shape{32, 6})}),
               Error);
  EXPECT_THROW(quantize(*ctx, {.x_RC = x.view(), .rule = ScaleRule::kGiven, .block = {0, 0}}), Error);
}

TEST(QuantizeTest, RefusesColumnsThatItHasNoKernelFor) {
  TestContext ctx(1);
  Tensor<float> x(Shape{256, 128}), wide(Shape{256, 128}, 2), scales(Shape{2, 128}), odd(Shape{256, 96});
  std::vector<uint8_t> codes(256 * 128);
  QuantizeArgs args{.x_RC = x.fill(1).view(), .rule = ScaleRule::kFloat, .block = {1, 128}};
  args.column_codes_CR = TensorView(codes.data(), DType::kU8, Shape{128, 256});
  args.column_scales_BC = scales.view();
  quantize(*ctx, args);
  const auto refuses = [&](const auto& change) {
    QuantizeArgs changed = args;
    change(changed);
    EXPECT_THROW(quantize(*ctx, changed), Error);
  };
  refuses([](QuantizeArgs& a) { a.rule = ScaleRule::kMxUp; });
  refuses([](QuantizeArgs& a) { a.block = {128, 1}; });
  refuses([](QuantizeArgs& a) { a.group_rows = 64; });
  refuses([&](QuantizeArgs& a) { a.x_RC = wide.view(); });  // rows at 8-byte addresses
  refuses([&](QuantizeArgs& a) { a.x_RC = odd.view(); });
  refuses([&](QuantizeArgs& a) { a.dequantized_RC = a.x_RC; });
  refuses([&](QuantizeArgs& a) { a.column_codes_CR.shape = Shape{256, 128}; });
  refuses([&](QuantizeArgs& a) { a.column_scales_BC.shape = Shape{128, 2}; });
  Tensor<int64_t> offsets(Shape{3});
  offsets.set({0, 64, 256});
  refuses([&](QuantizeArgs& a) { a.offsets_E1 = offsets.view(); });
}

TEST(UpdateDelayedScalesTest, KeepsAHistory) {
  TestContext ctx(1);
  Tensor<float> amax(Shape{3, 2}), scales(Shape{2});
  std::vector<uint8_t> formats{static_cast<uint8_t>(Fp8Format::kE4M3),
                               static_cast<uint8_t>(Fp8Format::kE5M2)};
  amax.fill(0);
  scales.fill(1);
  UpdateDelayedScalesArgs args{.amax_HN = amax.view(),
                               .scales_N = scales.view(),
                               .formats_N = TensorView(formats.data(), DType::kU8, Shape{2})};
  const auto step = [&](float a, float b) {
    amax.at(0, 0) = a;
    amax.at(0, 1) = b;
    update_delayed_scales(*ctx, args);
    return std::vector<double>{scales.at(0), scales.at(1)};
  };
  using V = std::vector<double>;
  EXPECT_EQ(step(448, 0), (V{1, 1}));  // nothing seen: as it was
  EXPECT_EQ(step(224, 57344), (V{1, 1}));
  EXPECT_EQ(amax.values(), (V{0, 0, 448, 0, 224, 57344}));
  EXPECT_EQ(step(112, 28672), (V{1, 1}));
  EXPECT_EQ(step(112, 28672), (V{2, 1}));  // 448 left the history
  args.most_recent = true;
  EXPECT_EQ(step(56, 28672), (V{8, 2}));
  args.margin = 1;
  EXPECT_EQ(step(56, INFINITY), (V{4, 2}));
  args.power_of_two = true;
  EXPECT_EQ(step(60, 28672), (V{2, 1}));
}

}  // namespace
}  // namespace biomoe::test
