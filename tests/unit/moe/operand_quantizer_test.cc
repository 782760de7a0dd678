// Products of a recipe against products in double of operands that the reference quantised.
#include "biomoe/moe/operand_quantizer.h"

#include "biomoe/moe/grouped_linear.h"
#include "tests/ops/op_test.h"
#include "tests/ref/grouped_gemm.h"
#include "tests/ref/quantize.h"

namespace biomoe::test {
namespace {

constexpr int64_t kIn = 70, kOut = 45;
const std::vector<int64_t> kOffsets{0, 0, 33, 34, 165, 165};
constexpr int64_t kExperts = 5, kRows = 165, kCapacity = 170;

struct RecipeCase {
  Fp8Recipe recipe;
  bool hybrid, power_2_scale;
};

class OperandQuantizerTest : public testing::TestWithParam<RecipeCase> {
 protected:
  OperandQuantizerTest() {
    config_.enabled = true;
    config_.fp8_recipe = GetParam().recipe;
    config_.fp8_format = GetParam().hybrid ? Fp8FormatChoice::kHybrid : Fp8FormatChoice::kE4M3;
    config_.fp8_recipe_kwargs.power_2_scale = GetParam().power_2_scale;
    x_.fill_normal(1);
    w_.fill_normal(2, 0.1);
    dy_.fill_normal(3, 1e-3);
    offsets_.set({kOffsets.begin(), kOffsets.end()});
    layer_.w_EOI = w_.view();
    layer_.dw_EOI = dw_.view();
    layer_.quantizer.config = &config_;
    for (size_t i = 0; i < 3; ++i) {
      layer_.quantizer.memory[i] = memory_[i].view();
      for (int64_t e = 0; e < kExperts; ++e)
        scales_[i].at(e) = static_cast<float>(1 + e) * (i == 2 ? 1e4f : 9.0f);
      amax_[i].fill(0);
      layer_.quantizer.delayed[i] = {scales_[i].view(), amax_[i].view()};
    }
    rows_.offsets_E1 = offsets_.view();
  }

  // What the product sees of an operand: of its first rows, in groups.
  ref::Vector seen(Operand operand, bool sums_over_rows, const ref::Vector& values, int64_t columns,
                   const std::vector<int64_t>& offsets) {
    const QuantizationSpec spec = quantization_spec(config_, operand, sums_over_rows);
    ref::QuantizeProblem problem{offsets.back(), columns, offsets, true, spec.format, spec.rule, spec.block};
    problem.given = scales_[static_cast<size_t>(operand)].values();
    ref::Vector first(values.begin(), values.begin() + offsets.back() * columns);
    const ref::Quantized quantized = ref::quantize(first, problem);
    if (config_.fp8_recipe == Fp8Recipe::kDelayedScaling) {
      EXPECT_EQ(amax_[static_cast<size_t>(operand)].values(), quantized.amax);
    }
    EXPECT_NE(quantized.values, first) << "nothing was rounded";
    return quantized.values;
  }
  std::vector<int64_t> weight_rows() const {
    std::vector<int64_t> offsets;
    for (int64_t e = 0; e <= kExperts; ++e) offsets.push_back(e * kOut);
    return offsets;
  }

  const ref::ExpertSizes sizes_{kIn, kOut, kOffsets};
  Fp8Config config_;
  Tensor<float> x_{Shape{kCapacity, kIn}}, w_{Shape{kExperts, kOut, kIn}}, dw_{Shape{kExperts, kOut, kIn}},
      dy_{Shape{kCapacity, kOut}};
  std::array<Tensor<float>, 3> memory_{Tensor<float>(Shape{kCapacity * kIn}),
                                       Tensor<float>(Shape{kExperts * kOut * kIn}),
                                       Tensor<float>(Shape{kCapacity * kOut})};
  std::array<Tensor<float>, 3> scales_{Tensor<float>(Shape{kExperts}), Tensor<float>(Shape{kExperts}),
                                       Tensor<float>(Shape{kExperts})};
  std::array<Tensor<float>, 3> amax_ = scales_;
  Tensor<int64_t> offsets_{Shape{kExperts + 1}};
  GroupedLinear layer_;
  ExpertRows rows_;
  TestContext ctx_{2};
};

// The values without the rows that are nobody's.
ref::Vector used(const Tensor<float>& tensor, int64_t columns) {
  const ref::Vector all = tensor.values();
  return {all.begin(), all.begin() + kRows * columns};
}

TEST_P(OperandQuantizerTest, Forward) {
  Tensor<float> y(Shape{kCapacity, kOut});
  layer_.forward(*ctx_, rows_, x_.view(), y.view());
  const auto x = seen(Operand::kActivation, false, x_.values(), kIn, kOffsets);
  const auto w = seen(Operand::kWeight, false, w_.values(), kIn, weight_rows());
  EXPECT_CLOSE(used(y, kOut), ref::grouped_forward(sizes_, x, w), DType::kF32);
}

TEST_P(OperandQuantizerTest, Dgrad) {
  Tensor<float> dx(Shape{kCapacity, kIn});
  layer_.dgrad(*ctx_, rows_, dy_.view(), dx.view());
  const auto dy = seen(Operand::kGradient, false, dy_.values(), kOut, kOffsets);
  const auto w = seen(Operand::kWeight, true, w_.values(), kIn, weight_rows());
  EXPECT_CLOSE(used(dx, kIn), ref::grouped_dgrad(sizes_, dy, w), DType::kF32);
}

TEST_P(OperandQuantizerTest, Wgrad) {
  layer_.wgrad(*ctx_, rows_, dy_.view(), x_.view(), false);
  const auto dy = seen(Operand::kGradient, true, dy_.values(), kOut, kOffsets);
  const auto x = seen(Operand::kActivation, true, x_.values(), kIn, kOffsets);
  EXPECT_CLOSE(dw_.values(), ref::grouped_wgrad(sizes_, dy, x, ref::Vector(w_.values().size(), 0.0)),
               DType::kF32);
}

INSTANTIATE_TEST_SUITE_P(Recipes, OperandQuantizerTest,
                         testing::Values(RecipeCase{Fp8Recipe::kMxfp8BlockScaling, false, true},
                                         RecipeCase{Fp8Recipe::kMxfp8BlockScaling, true, true},
                                         RecipeCase{Fp8Recipe::kFloat8BlockScaling, false, true},
                                         RecipeCase{Fp8Recipe::kFloat8BlockScaling, false, false},
                                         RecipeCase{Fp8Recipe::kFloat8CurrentScaling, true, true},
                                         RecipeCase{Fp8Recipe::kFloat8CurrentScaling, true, false},
                                         RecipeCase{Fp8Recipe::kDelayedScaling, true, true}));

TEST(NativeProducts, SayWhatStandsInTheirWay) {
  Fp8Config config;
  config.enabled = true;
  config.fp8_recipe = Fp8Recipe::kFloat8BlockScaling;
  const auto why = [&](Device device, int64_t out, int64_t in) {
    return native_obstacle(config, device, out, in);
  };
  EXPECT_EQ(why(Device::kCuda, 256, 384), "");
  EXPECT_NE(why(Device::kCpu, 256, 384).find("CPU"), std::string::npos);
  EXPECT_NE(why(Device::kCuda, 192, 384).find("384 and 192"), std::string::npos);
  EXPECT_NE(why(Device::kCuda, 256, 64).find("64 and 256"), std::string::npos);
  config.fp8_recipe_kwargs.emulate = true;
  EXPECT_NE(why(Device::kCuda, 256, 384).find("emulate"), std::string::npos);
  config.fp8_recipe_kwargs.emulate = false;
  config.fp8_format = Fp8FormatChoice::kHybrid;
  EXPECT_NE(why(Device::kCuda, 256, 384).find("E4M3"), std::string::npos);
  config.fp8_format = Fp8FormatChoice::kAuto;
  config.fp8_recipe = Fp8Recipe::kMxfp8BlockScaling;
  EXPECT_NE(why(Device::kCpu, 256, 384).find("CPU"), std::string::npos);
  config.fp8_recipe_kwargs.emulate = true;
  EXPECT_NE(why(Device::kCuda, 256, 384).find("emulate"), std::string::npos);
  config.fp8_recipe = Fp8Recipe::kFloat8CurrentScaling;
  EXPECT_NE(why(Device::kCuda, 256, 384).find("Float8BlockScaling"), std::string::npos);
}

TEST(NativeProducts, AreToldByTheLayer) {
  Fp8Config config;
  config.enabled = true;
  config.fp8_recipe = Fp8Recipe::kFloat8BlockScaling;
  Tensor<float> w(Shape{2, 256, 128});
  std::vector<uint8_t> codes(1);
  GroupedLinear layer{.w_EOI = w.view()};
  EXPECT_EQ(layer.precision(Device::kCuda), dtype_name(DType::kF32));
  layer.quantizer.config = &config;
  EXPECT_EQ(layer.precision(Device::kCpu), "Float8BlockScaling emulated: the CPU multiplies no codes");
  EXPECT_EQ(layer.precision(Device::kCuda), "Float8BlockScaling emulated: no memory for codes");
  layer.quantizer.codes.weights_EOI = TensorView(codes.data(), DType::kU8, Shape{2, 256, 128});
  EXPECT_EQ(layer.precision(Device::kCuda), "Float8BlockScaling native");
  layer.product = GroupedProduct::kLoop;
  EXPECT_EQ(layer.precision(Device::kCuda), "Float8BlockScaling emulated: one GEMM an expert");
}

// Formats and blocks as docs/numerics.md lists them.
TEST(RecipeTest, SpecsAreThoseOfTheTable) {
  const auto spec = [](Fp8Recipe recipe, Fp8FormatChoice format, Operand operand, bool sums_over_rows) {
    Fp8Config config;
    config.fp8_recipe = recipe;
    config.fp8_format = format;
    return quantization_spec(config, operand, sums_over_rows);
  };
  using R = Fp8Recipe;
  using F = Fp8FormatChoice;
  EXPECT_EQ(spec(R::kMxfp8BlockScaling, F::kAuto, Operand::kGradient, false).block, (BlockShape{1, 32}));
  EXPECT_EQ(spec(R::kMxfp8BlockScaling, F::kAuto, Operand::kWeight, true).block, (BlockShape{32, 1}));
  EXPECT_EQ(spec(R::kFloat8BlockScaling, F::kAuto, Operand::kWeight, true).block, (BlockShape{128, 128}));
  EXPECT_EQ(spec(R::kFloat8BlockScaling, F::kAuto, Operand::kActivation, true).block, (BlockShape{128, 1}));
  EXPECT_EQ(spec(R::kFloat8BlockScaling, F::kAuto, Operand::kGradient, false).block, (BlockShape{1, 128}));
  EXPECT_EQ(spec(R::kFloat8CurrentScaling, F::kAuto, Operand::kWeight, false).block, (BlockShape{0, 0}));
  EXPECT_EQ(spec(R::kDelayedScaling, F::kAuto, Operand::kGradient, true).rule, ScaleRule::kGiven);
  for (const R recipe : {R::kMxfp8BlockScaling, R::kFloat8BlockScaling}) {
    EXPECT_EQ(spec(recipe, F::kAuto, Operand::kGradient, false).format, Fp8Format::kE4M3);
    EXPECT_EQ(spec(recipe, F::kHybrid, Operand::kGradient, false).format, Fp8Format::kE5M2);
  }
  for (const R recipe : {R::kFloat8CurrentScaling, R::kDelayedScaling}) {
    EXPECT_EQ(spec(recipe, F::kAuto, Operand::kGradient, false).format, Fp8Format::kE5M2);
    EXPECT_EQ(spec(recipe, F::kAuto, Operand::kActivation, false).format, Fp8Format::kE4M3);
    EXPECT_EQ(spec(recipe, F::kE4M3, Operand::kGradient, false).format, Fp8Format::kE4M3);
  }
}

}  // namespace
}  // namespace biomoe::test
