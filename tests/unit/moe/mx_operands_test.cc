// Products of MX codes, by the CPU's reference, against the emulation of the recipe: in every bit, since both
// multiply what the codes stand for in FP32.
#include "biomoe/moe/grouped_linear.h"
#include "biomoe/moe/operand_quantizer.h"
#include "biomoe/ops/gemm.h"
#include "tests/ops/op_test.h"

namespace biomoe::test {
namespace {

constexpr int64_t kIn = 96, kOut = 160;
const std::vector<int64_t> kOffsets{0, 0, 128, 384, 512};
constexpr int64_t kExperts = 4, kCapacity = 640;  // the last 128 rows are nobody's

class MxOperandsTest : public testing::TestWithParam<MxScaleRounding> {
 protected:
  MxOperandsTest() {
    config_.enabled = true;
    config_.fp8_recipe = Fp8Recipe::kMxfp8BlockScaling;
    config_.fp8_recipe_kwargs.scale_rounding = GetParam();
    x_.fill_normal(1);
    w_.fill_normal(2, 0.1);
    dy_.fill_normal(3, 1e-3);
    matrix_.fill_normal(4, 0.1);
    offsets_.set({kOffsets.begin(), kOffsets.end()});
    rows_.offsets_E1 = offsets_.view();
    emulated_.config = native_.config = &config_;
    for (size_t i = 0; i < memory_.size(); ++i) emulated_.memory[i] = memory_[i].view();
    const std::array<ProductRows, 2> products{{{kCapacity, kOut, kIn, kExperts}, {kCapacity, kOut, kIn}}};
    arena_ =
        Arena(planned_bytes([&](TensorAllocator& to) { allocate_mx_codes(to, products, true); }), "codes");
    native_.mx = allocate_mx_codes(arena_, products, true);
  }

  GroupedLinear layer(const OperandQuantizer& quantizer) {
    return {.w_EOI = w_.view(), .dw_EOI = dw_.view(), .quantizer = quantizer};
  }
  static std::vector<double> used(const Tensor<float>& tensor, int64_t columns) {
    const std::vector<double> all = tensor.values();
    return {all.begin(), all.begin() + kOffsets.back() * columns};
  }

  Fp8Config config_;
  Tensor<float> x_{Shape{kCapacity, kIn}}, dy_{Shape{kCapacity, kOut}}, w_{Shape{kExperts, kOut, kIn}},
      dw_{Shape{kExperts, kOut, kIn}}, matrix_{Shape{kOut, kIn}};
  std::array<Tensor<float>, 3> memory_{Tensor<float>(Shape{kCapacity * kIn}),
                                       Tensor<float>(Shape{kExperts * kOut * kIn}),
                                       Tensor<float>(Shape{kCapacity * kOut})};
  Tensor<int64_t> offsets_{Shape{kExperts + 1}};
  Arena arena_;
  OperandQuantizer emulated_, native_;
  ExpertRows rows_;
  TestContext ctx_{2};
};

TEST_P(MxOperandsTest, ProductsOfExpertsAreTheEmulations) {
  std::array<std::vector<double>, 3> want;
  for (const OperandQuantizer* quantizer : {&emulated_, &native_}) {
    const GroupedLinear of = layer(*quantizer);
    EXPECT_EQ(of.native_mx(), quantizer == &native_);
    Tensor<float> y(Shape{kCapacity, kOut}), dx(Shape{kCapacity, kIn});
    of.forward(*ctx_, rows_, x_.view(), y.view());
    of.wgrad(*ctx_, rows_, dy_.view(), x_.view(), false);
    of.dgrad(*ctx_, rows_, dy_.view(), dx.view());
    std::array<std::vector<double>, 3> got{used(y, kOut), dw_.values(), used(dx, kIn)};
    if (quantizer == &emulated_) {
      want = got;
      dw_.fill(0);
      continue;
    }
    for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i], want[i]) << i;
  }
  // Added to.
  layer(native_).wgrad(*ctx_, rows_, dy_.view(), x_.view(), true);
  const std::vector<double> twice = dw_.values();
  for (size_t i = 0; i < twice.size(); ++i) ASSERT_EQ(twice[i], 2 * want[1][i]) << i;
}

TEST_P(MxOperandsTest, ProductsOfOneMatrixAreTheEmulations) {
  for (const int64_t rows : {int64_t{16}, int64_t{208}}) {
    ASSERT_TRUE(native_.native_mx(rows));
    const TensorView x = x_.view().rows(0, rows), dy = dy_.view().rows(0, rows);
    Tensor<float> y(Shape{rows, kOut}), want_y(Shape{rows, kOut}), dx(Shape{rows, kIn}),
        want_dx(Shape{rows, kIn});
    Tensor<float> dw(Shape{kOut, kIn}), want_dw(Shape{kOut, kIn});
    gemm(*ctx_, {.a = x,
                 .b = matrix_.view(),
                 .c = y.view(),
                 .transpose_b = true,
                 .mx_codes = native_.mx_forward(*ctx_, x, matrix_.view(), {})});
    gemm(*ctx_, {.a = emulated_.matrix(*ctx_, Operand::kActivation, false, x),
                 .b = emulated_.matrix(*ctx_, Operand::kWeight, false, matrix_.view()),
                 .c = want_y.view(),
                 .transpose_b = true});
    EXPECT_EQ(y.values(), want_y.values());
    gemm(*ctx_, {.a = dy,
                 .b = x,
                 .c = dw.view(),
                 .transpose_a = true,
                 .mx_codes = native_.mx_wgrad(*ctx_, dy, x, {})});
    gemm(*ctx_, {.a = emulated_.matrix(*ctx_, Operand::kGradient, true, dy),
                 .b = emulated_.matrix(*ctx_, Operand::kActivation, true, x),
                 .c = want_dw.view(),
                 .transpose_a = true});
    EXPECT_EQ(dw.values(), want_dw.values());
    gemm(*ctx_, {.a = dy,
                 .b = matrix_.view(),
                 .c = dx.view(),
                 .mx_codes = native_.mx_dgrad(*ctx_, dy, matrix_.view(), {})});
    gemm(*ctx_, {.a = emulated_.matrix(*ctx_, Operand::kGradient, false, dy),
                 .b = emulated_.matrix(*ctx_, Operand::kWeight, true, matrix_.view()),
                 .c = want_dx.view()});
    EXPECT_EQ(dx.values(), want_dx.values());
  }
  EXPECT_FALSE(native_.native_mx(17));
  EXPECT_FALSE(emulated_.native_mx(16));
}

TEST_P(MxOperandsTest, SaysWhenMemoryIsTooSmall) {
  const std::array<ProductRows, 1> small{{{128, kOut, kIn, kExperts}}};
  Arena arena(planned_bytes([&](TensorAllocator& to) { allocate_mx_codes(to, small, true); }), "codes");
  const OperandQuantizer quantizer{.config = &config_, .mx = allocate_mx_codes(arena, small, true)};
  EXPECT_THROW(quantizer.mx_forward(*ctx_, x_.view(), w_.view(), offsets_.view()), Error);
}

INSTANTIATE_TEST_SUITE_P(Rounding, MxOperandsTest,
                         testing::Values(MxScaleRounding::kUp, MxScaleRounding::kFloor));

}  // namespace
}  // namespace biomoe::test
