#include "biomoe/ops/mx_weights.h"

#include <gmock/gmock.h>

#include "biomoe/core/error.h"
#include "biomoe/ops/quantize.h"
#include "tests/ops/mx_weights_cases.h"
#include "tests/ops/op_test.h"

namespace biomoe::test {
namespace {

std::vector<uint32_t> bits(const std::vector<float>& values) {
  std::vector<uint32_t> result;
  for (const float value : values) result.push_back(std::bit_cast<uint32_t>(value));
  return result;
}

// What quantize() makes of the weights in blocks of one row or of one column.
struct Direct {
  Direct(const TensorView& w_EOI, ScaleRule rule, bool by_column)
      : values(Shape{w_EOI.shape[0] * w_EOI.shape[1], w_EOI.shape[2]}) {
    QuantizeArgs args{.x_RC = TensorView(w_EOI.data, DType::kF32, values.shape()), .rule = rule};
    args.block = by_column ? BlockShape{32, 1} : BlockShape{1, 32};
    const BlockGrid grid = block_grid(args);
    scales.resize(static_cast<size_t>(grid.bands() * grid.block_columns()));
    args.scales_NB = TensorView(scales.data(), DType::kU8, Shape{grid.bands(), grid.block_columns()});
    args.dequantized_RC = values.view();
    TestContext ctx(2);
    quantize(*ctx, args);
  }
  Tensor<float> values;
  std::vector<uint8_t> scales;
};

class MxWeightsTest : public testing::TestWithParam<ScaleRule> {};

TEST_P(MxWeightsTest, IsWhatQuantizeGivesInEachDirection) {
  for (const Shape& shape : kMxWeightShapes) {
    SCOPED_TRACE(shape.str());
    Tensor<float> w(shape), values(shape);
    w.set(mx_weight_values(shape));
    const int64_t bands = shape[0] * shape[1] / 32, across = shape[2] / 32;
    std::vector<uint8_t> scales(static_cast<size_t>(bands * shape[2]), 0xff);
    Tensor<int32_t> differ(Shape{bands, across});
    const MxWeights kept{.rule = GetParam(),
                         .values_EOI = values.view(),
                         .column_scales_BI = TensorView(scales.data(), DType::kU8, Shape{bands, shape[2]}),
                         .differ_BS = differ.view()};
    TestContext ctx(3);
    write_mx_weights(*ctx, {.w_EOI = w.view(), .to = kept});
    const Direct rows(w.view(), GetParam(), false), columns(w.view(), GetParam(), true);
    EXPECT_EQ(bits(values.elements()), bits(rows.values.elements()));
    EXPECT_EQ(scales, columns.scales);
    const auto by_row = bits(rows.values.elements()), by_column = bits(columns.values.elements());
    std::vector<int32_t> want(static_cast<size_t>(bands * across));
    for (size_t i = 0; i < by_row.size(); ++i) {
      const int64_t row = static_cast<int64_t>(i) / shape[2], column = static_cast<int64_t>(i) % shape[2];
      if (by_row[i] == by_column[i]) continue;
      auto& word = want[static_cast<size_t>(row / 32 * across + column / 32)];
      word = static_cast<int32_t>(static_cast<uint32_t>(word) | 1u << row % 32);
    }
    EXPECT_EQ(differ.elements(), want);
    EXPECT_NE(want.back(), 0);  // else nothing is tested
    if (want.size() > 1) {
      EXPECT_THAT(want, testing::Contains(0));
    }
    for (const bool turn : {true, true, false, false, true}) {
      turn_mx_weights(*ctx, {.w_EOI = w.view(), .of = kept, .by_column = turn});
      EXPECT_EQ(bits(values.elements()), turn ? by_column : by_row);
    }
  }
}

TEST_P(MxWeightsTest, RefusesWhatHasNoWholeBlocks) {
  const Shape shape{1, 32, 48};
  Tensor<float> w(shape), values(shape);
  std::vector<uint8_t> scales(48);
  Tensor<int32_t> differ(Shape{1, 1});
  const MxWeights kept{.rule = GetParam(),
                       .values_EOI = values.view(),
                       .column_scales_BI = TensorView(scales.data(), DType::kU8, Shape{1, 48}),
                       .differ_BS = differ.view()};
  TestContext ctx(1);
  EXPECT_THROW(write_mx_weights(*ctx, {.w_EOI = w.view(), .to = kept}), Error);
}

INSTANTIATE_TEST_SUITE_P(Rules, MxWeightsTest, testing::Values(ScaleRule::kMxUp, ScaleRule::kMxFloor));

}  // namespace
}  // namespace biomoe::test
