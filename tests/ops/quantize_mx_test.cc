// What quantise() gives Blackwell's products: scales in their layout, and transposed codes, against the plain
// outputs for the same blocks.
#include "biomoe/ops/quantize.h"
#include "biomoe/quant/mx_grid_scales.h"
#include "tests/ops/op_test.h"
#include "tests/ops/quantize_cases.h"

namespace biomoe::test {
namespace {

// Where the scale of block `block` of row `row` of a matrix of so many blocks lies, as its tiles are written
// down: 128 rows x 4 blocks, in which rows 32 apart lie beside each other.
size_t scale_place(int64_t row, int64_t block, int64_t blocks) {
  const int64_t tile = row / 128 * ((blocks + 3) / 4) + block / 4;
  return static_cast<size_t>(tile * 512 + row % 32 * 16 + row % 128 / 32 * 4 + block % 4);
}

size_t layout_bytes(int64_t rows, int64_t blocks) {
  return static_cast<size_t>((rows + 127) / 128 * 128 * ((blocks + 3) / 4) * 4);
}

struct Outputs {
  std::vector<uint8_t> codes, scales, transposed, mx_scales;
};

class MxQuantizeTest : public testing::TestWithParam<QuantizeCase> {
 protected:
  void SetUp() override {
    const QuantizeCase& c = GetParam();
    x_.set(padded_values(c));
    offsets_.set({c.offsets.begin(), c.offsets.end()});
  }

  QuantizeArgs args(BlockShape block, ScaleRule rule) {
    QuantizeArgs args{.x_RC = x_.view(), .rule = rule, .block = block, .group_rows = GetParam().group_rows};
    if (!GetParam().offsets.empty()) args.offsets_E1 = offsets_.view();
    return args;
  }

  // Every output, with a byte after it that must stay as it is.
  Outputs run(QuantizeArgs args, bool transposed) const {
    const QuantizeCase& c = GetParam();
    const BlockGrid grid = block_grid(args);
    const int64_t rows = c.group_rows > 0 ? c.group_rows : c.rows,
                  groups = c.group_rows > 0 ? grid.groups : 1;
    const Shape blocks{grid.bands(), grid.block_columns()};
    const auto elements = static_cast<size_t>(c.rows * c.columns);
    const auto bytes = [](int64_t count) {
      return std::vector<uint8_t>(static_cast<size_t>(count) + 1, 0xff);
    };
    Outputs to{bytes(c.rows * c.columns), bytes(blocks.num_elements()), bytes(c.rows * c.columns),
               bytes(MxGridScales(grid).bytes())};
    args.data_RC = TensorView(to.codes.data(), DType::kU8, x_shape());
    args.scales_NB = TensorView(to.scales.data(), DType::kU8, blocks);
    args.mx_scales_S =
        TensorView(to.mx_scales.data(), DType::kU8, Shape{static_cast<int64_t>(to.mx_scales.size()) - 1});
    if (transposed) {
      args.transposed_CR = TensorView(to.transposed.data(), DType::kU8, Shape{groups * c.columns, rows});
    }
    TestContext ctx(3);
    quantize(*ctx, args);
    EXPECT_EQ(to.mx_scales.back(), 0xff);
    EXPECT_EQ(to.transposed.back(), 0xff);
    EXPECT_EQ(to.transposed.size(), elements + 1);
    return to;
  }

  Shape x_shape() const { return {GetParam().rows, GetParam().columns}; }
  int64_t used() const { return GetParam().offsets.empty() ? GetParam().rows : GetParam().offsets.back(); }

 private:
  Tensor<float> x_{Shape{GetParam().rows, GetParam().columns}};
  Tensor<int64_t> offsets_{Shape{static_cast<int64_t>(GetParam().offsets.size())}};
};

TEST_P(MxQuantizeTest, RowScales) {
  const QuantizeCase& c = GetParam();
  const int64_t rows = c.group_rows > 0 ? c.group_rows : c.rows, blocks = (c.columns + 31) / 32;
  for (const ScaleRule rule : {ScaleRule::kMxUp, ScaleRule::kMxFloor}) {
    const QuantizeArgs asked = args({1, 32}, rule);
    const BlockGrid grid = block_grid(asked);
    const Outputs got = run(asked, false);
    const size_t group_bytes = layout_bytes(rows, blocks);
    std::vector<uint8_t> want(got.mx_scales.size(), 0);
    want.back() = 0xff;
    for (int64_t r = 0; r < used(); ++r) {
      const int64_t band = grid.grouped() ? r + grid.group_of_row(r) : r;
      for (int64_t b = 0; b < blocks; ++b) {
        want.at(static_cast<size_t>(r / rows) * group_bytes + scale_place(r % rows, b, blocks)) =
            got.scales[static_cast<size_t>(band * blocks + b)];
      }
    }
    EXPECT_EQ(got.mx_scales, want);
  }
}

TEST_P(MxQuantizeTest, ColumnScalesAndTransposedCodes) {
  const QuantizeCase& c = GetParam();
  const int64_t rows = c.group_rows > 0 ? c.group_rows : c.rows, blocks = (rows + 31) / 32;
  for (const ScaleRule rule : {ScaleRule::kMxUp, ScaleRule::kMxFloor}) {
    const QuantizeArgs asked = args({32, 1}, rule);
    const BlockGrid grid = block_grid(asked);
    const Outputs got = run(asked, true);
    const size_t group_bytes = layout_bytes(c.columns, blocks);
    std::vector<uint8_t> scales(got.mx_scales.size(), 0), codes(got.transposed.size(), 0xff);
    scales.back() = 0xff;
    for (int64_t r = 0; r < used(); ++r) {
      const int64_t matrix = r / rows, own = r % rows, group = grid.grouped() ? grid.group_of_row(r) : 0;
      const int64_t band = grid.first_band(group) + (r - grid.group_begin(group)) / 32;
      for (int64_t column = 0; column < c.columns; ++column) {
        scales.at(static_cast<size_t>(matrix) * group_bytes + scale_place(column, own / 32, blocks)) =
            got.scales[static_cast<size_t>(band * c.columns + column)];
        codes.at(static_cast<size_t>((matrix * c.columns + column) * rows + own)) =
            got.codes[static_cast<size_t>(r * c.columns + column)];
      }
    }
    EXPECT_EQ(got.mx_scales, scales);
    EXPECT_EQ(got.transposed, codes);
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, MxQuantizeTest, testing::ValuesIn(kMxCases));

TEST(MxQuantize, RefusesWhatItHasNoLayoutFor) {
  TestContext ctx(1);
  Tensor<float> x(Shape{64, 32});
  x.fill(1);
  std::vector<uint8_t> bytes(4096);
  const auto refused = [&](QuantizeArgs args, int64_t scales, Shape transposed) {
    if (scales >= 0) args.mx_scales_S = TensorView(bytes.data(), DType::kU8, Shape{scales});
    if (transposed.rank() > 0) args.transposed_CR = TensorView(bytes.data(), DType::kU8, transposed);
    try {
      quantize(*ctx, args);
    } catch (const Error&) {
      return true;
    }
    return false;
  };
  EXPECT_FALSE(refused({.x_RC = x.view()}, 512, {}));
  EXPECT_TRUE(refused({.x_RC = x.view()}, 511, {}));
  EXPECT_TRUE(refused({.x_RC = x.view(), .format = Fp8Format::kE5M2}, 512, {}));
  EXPECT_TRUE(refused({.x_RC = x.view(), .rule = ScaleRule::kPowerOfTwo}, 512, {}));
  EXPECT_TRUE(refused({.x_RC = x.view(), .block = {128, 128}}, 512, {}));
  EXPECT_FALSE(refused({.x_RC = x.view(), .block = {32, 1}}, 512, Shape{32, 64}));
  EXPECT_TRUE(refused({.x_RC = x.view(), .block = {32, 1}}, 512, Shape{64, 32}));
  EXPECT_TRUE(refused({.x_RC = x.view()}, -1, Shape{32, 64}));  // blocks of 1x32
  EXPECT_TRUE(refused({.x_RC = x.view(), .block = {32, 1}, .group_rows = 8}, -1, Shape{256, 8}));
  Tensor<int64_t> offsets(Shape{3});
  offsets.set({0, 16, 64});
  EXPECT_TRUE(
      refused({.x_RC = x.view(), .block = {32, 1}, .offsets_E1 = offsets.view()}, 512, Shape{32, 64}));
}

}  // namespace
}  // namespace biomoe::test
