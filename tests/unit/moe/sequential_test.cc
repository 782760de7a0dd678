// The public layers against plain computations in double, for any split sizes.
#include "biomoe/moe/sequential.h"

#include <numeric>

#include "biomoe/moe/split_sequential.h"
#include "tests/ops/op_test.h"
#include "tests/ref/grouped_gemm.h"
#include "tests/ref/scaled_swiglu.h"

namespace biomoe::test {
namespace {

constexpr int64_t kIn = 20, kWidth = 12, kOut = 9, kExperts = 5;

struct SplitCase {
  std::vector<int64_t> splits;
  int64_t rows() const { return std::accumulate(splits.begin(), splits.end(), int64_t{0}); }
  ref::ExpertSizes sizes(int64_t in, int64_t out) const {
    ref::ExpertSizes sizes{in, out, {0}};
    for (const int64_t split : splits) sizes.offsets.push_back(sizes.offsets.back() + split);
    return sizes;
  }
};

const SplitCase kSplitCases[] = {
    {{0, 1, 31, 33, 97}}, {{162, 0, 0, 0, 0}}, {{0, 0, 0, 0, 97}},
    {{1, 1, 1, 1, 1}},    {{0, 0, 0, 0, 0}},   {{128, 64, 32, 0, 2}},
};

// Weights, inputs and the reference's results of an MLP.
struct Mlp {
  explicit Mlp(const SplitCase& c)
      : rows(c.rows()),
        up(Shape{kExperts, 2 * kWidth, kIn}),
        down(Shape{kExperts, kOut, kWidth}),
        dup(up.shape()),
        ddown(down.shape()),
        x(Shape{rows, kIn}),
        scales(Shape{rows}),
        dy(Shape{rows, kOut}) {
    up.fill_normal(1, 0.3);
    down.fill_normal(2, 0.3);
    x.fill_normal(3);
    scales.fill_normal(4, 0.2, 0.5);
    dy.fill_normal(5);
    const auto first = c.sizes(kIn, 2 * kWidth), last = c.sizes(kWidth, kOut);
    const ref::Vector hidden = ref::grouped_forward(first, x.values(), up.values());
    const ref::Vector act = ref::scaled_swiglu(hidden, scales.values(), kWidth);
    want_y = ref::grouped_forward(last, act, down.values());
    want_ddown = ref::grouped_wgrad(last, dy.values(), act, ref::Vector(down.values().size(), 0.0));
    const ref::Vector dact = ref::grouped_dgrad(last, dy.values(), down.values());
    const auto inner = ref::scaled_swiglu_backward(dact, hidden, scales.values(), kWidth);
    want_dscales = inner.dprobs;
    want_dup = ref::grouped_wgrad(first, inner.dgate_up, x.values(), ref::Vector(up.values().size(), 0.0));
    want_dx = ref::grouped_dgrad(first, inner.dgate_up, up.values());
  }
  Sequential layers(Fusion fusion, GroupedProduct product = GroupedProduct::kGrouped) {
    return Sequential(
        Device::kCpu, DType::kF32,
        {GroupedLinear{.w_EOI = up.view(), .dw_EOI = dup.view(), .product = product}, ScaledSwiGLU{},
         GroupedLinear{.w_EOI = down.view(), .dw_EOI = ddown.view(), .product = product}},
        fusion);
  }

  int64_t rows;
  Tensor<float> up, down, dup, ddown, x, scales, dy;
  ref::Vector want_y, want_dx, want_dup, want_ddown, want_dscales;
};

class SplitSequentialTest : public testing::TestWithParam<SplitCase> {};

TEST_P(SplitSequentialTest, MatchesTheReferenceHoweverItRuns) {
  const SplitCase& c = GetParam();
  Mlp mlp(c);
  for (const auto& [fusion, product] :
       {std::pair{Fusion::kRequired, GroupedProduct::kGrouped},
        std::pair{Fusion::kOff, GroupedProduct::kGrouped}, std::pair{Fusion::kAuto, GroupedProduct::kLoop}}) {
    TestContext ctx(2);
    SplitSequential session(*ctx, DType::kF32, mlp.layers(fusion, product), mlp.rows + 7);
    SCOPED_TRACE(session.describe());
    for (const int64_t call : {0, 1}) {  // memory is used again
      Tensor<float> y(Shape{mlp.rows, kOut}), dx(mlp.x.shape()), dscales(Shape{mlp.rows});
      session.forward(mlp.x.view(), c.splits, mlp.scales.view(), y.view());
      EXPECT_CLOSE(y.values(), mlp.want_y, DType::kF32);
      SplitSequential::Gradients gradients;
      gradients.x_NI = mlp.x.view();
      gradients.scales_N = mlp.scales.view();
      gradients.dy_NO = mlp.dy.view();
      gradients.dx_NI = dx.view();
      gradients.dscales_N = dscales.view();
      gradients.accumulate = call == 1;
      session.backward(gradients);
      EXPECT_CLOSE(dx.values(), mlp.want_dx, DType::kF32);
      EXPECT_CLOSE(dscales.values(), mlp.want_dscales, DType::kF32);
      const auto times = [&](ref::Vector values) {
        for (double& value : values) value *= static_cast<double>(call + 1);
        return values;
      };
      EXPECT_CLOSE(mlp.dup.values(), times(mlp.want_dup), DType::kF32);
      EXPECT_CLOSE(mlp.ddown.values(), times(mlp.want_ddown), DType::kF32);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Splits, SplitSequentialTest, testing::ValuesIn(kSplitCases));

TEST(SplitSequentialTest, RefusesSplitsThatDoNotAddUp) {
  Mlp mlp(SplitCase{{1, 2, 3, 4, 5}});
  TestContext ctx(1);
  SplitSequential session(*ctx, DType::kF32, mlp.layers(Fusion::kAuto), mlp.rows);
  Tensor<float> y(Shape{mlp.rows, kOut});
  const auto forward = [&](std::vector<int64_t> splits) {
    session.forward(mlp.x.view(), splits, mlp.scales.view(), y.view());
  };
  EXPECT_NO_THROW(forward({1, 2, 3, 4, 5}));
  EXPECT_THROW(forward({1, 2, 3, 4}), Error);
  EXPECT_THROW(forward({1, 2, 3, 4, 4}), Error);
  EXPECT_THROW(forward({1, 2, 3, 4, 6}), Error);
  EXPECT_THROW(forward({-1, 4, 3, 4, 5}), Error);
  SplitSequential small(*ctx, DType::kF32, mlp.layers(Fusion::kAuto), mlp.rows - 1);
  EXPECT_THROW(small.forward(mlp.x.view(), std::vector<int64_t>{1, 2, 3, 4, 5}, mlp.scales.view(), y.view()),
               Error);
}

TEST(SequentialTest, LayersOfWhichOneMultipliesCodesAreNotFused) {
  Tensor<float> up(Shape{2, 512, 128}), down(Shape{2, 128, 256});
  Fp8Config config;
  config.enabled = true;
  config.fp8_recipe = Fp8Recipe::kFloat8BlockScaling;
  std::vector<uint8_t> codes(1);
  GroupedLinear first{.w_EOI = up.view()}, last{.w_EOI = down.view()};
  first.quantizer.config = last.quantizer.config = &config;
  const auto layers = [&] {
    return Sequential(Device::kCpu, DType::kF32, {first, ScaledSwiGLU{.interleave = 32}, last});
  };
  EXPECT_TRUE(layers().fused_at(0));
  EXPECT_FALSE(layers().codes_at(0));
  first.quantizer.codes.weights_EOI = TensorView(codes.data(), DType::kU8, up.shape());
  EXPECT_FALSE(layers().fused_at(0));
  EXPECT_NE(layers().describe().find("only one multiplies codes"), std::string::npos) << layers().describe();
  last.quantizer.codes.weights_EOI = TensorView(codes.data(), DType::kU8, down.shape());
  EXPECT_TRUE(layers().codes_at(0));
}

// Layers in any order: two linear maps in a row, an activation at the end.
TEST(SequentialTest, RunsWhatItDoesNotFuse) {
  const SplitCase c{{3, 0, 7, 1, 2}};
  Tensor<float> a(Shape{kExperts, 8, kIn}), b(Shape{kExperts, 2 * kWidth, 8}), da(a.shape()), db(b.shape());
  Tensor<float> x(Shape{c.rows(), kIn}), y(Shape{c.rows(), kWidth}), dy(y.shape()), dx(x.shape());
  Tensor<float> scales(Shape{c.rows()}), dscales(Shape{c.rows()});
  a.fill_normal(1);
  b.fill_normal(2);
  x.fill_normal(3);
  dy.fill_normal(4);
  scales.fill_normal(5);
  TestContext ctx(2);
  const Sequential layers(
      Device::kCpu, DType::kF32,
      {GroupedLinear{.w_EOI = a.view(), .dw_EOI = da.view()},
       GroupedLinear{.w_EOI = b.view(), .dw_EOI = db.view()}, ScaledSwiGLU{.interleave = 4}});
  EXPECT_FALSE(layers.fused_at(0) || layers.fused_at(1));
  SplitSequential session(*ctx, DType::kF32, layers, c.rows());
  session.forward(x.view(), c.splits, scales.view(), y.view());
  const auto first = c.sizes(kIn, 8), second = c.sizes(8, 2 * kWidth);
  const ref::Vector hidden = ref::grouped_forward(first, x.values(), a.values());
  const ref::Vector gate_up = ref::grouped_forward(second, hidden, b.values());
  // Column of the half-by-half layout that column i of the interleaved one is.
  std::vector<size_t> from;
  for (size_t i = 0; i < 2 * kWidth; ++i) from.push_back(i / 8 * 4 + i % 4 + (i % 8 < 4 ? 0 : kWidth));
  ref::Vector halves(gate_up.size());
  for (size_t i = 0; i < gate_up.size(); ++i) {
    halves[i / (2 * kWidth) * 2 * kWidth + from[i % (2 * kWidth)]] = gate_up[i];
  }
  EXPECT_CLOSE(y.values(), ref::scaled_swiglu(halves, scales.values(), kWidth), DType::kF32);
  SplitSequential::Gradients gradients;
  gradients.x_NI = x.view();
  gradients.scales_N = scales.view();
  gradients.dy_NO = dy.view();
  gradients.dx_NI = dx.view();
  gradients.dscales_N = dscales.view();
  session.backward(gradients);
  const auto inner = ref::scaled_swiglu_backward(dy.values(), halves, scales.values(), kWidth);
  ref::Vector dgate_up(gate_up.size());
  for (size_t i = 0; i < gate_up.size(); ++i) {
    dgate_up[i] = inner.dgate_up[i / (2 * kWidth) * 2 * kWidth + from[i % (2 * kWidth)]];
  }
  EXPECT_CLOSE(dscales.values(), inner.dprobs, DType::kF32);
  EXPECT_CLOSE(db.values(), ref::grouped_wgrad(second, dgate_up, hidden, ref::Vector(b.values().size(), 0.0)),
               DType::kF32);
  const ref::Vector dhidden = ref::grouped_dgrad(second, dgate_up, b.values());
  EXPECT_CLOSE(da.values(),
               ref::grouped_wgrad(first, dhidden, x.values(), ref::Vector(a.values().size(), 0.0)),
               DType::kF32);
  EXPECT_CLOSE(dx.values(), ref::grouped_dgrad(first, dhidden, a.values()), DType::kF32);
}

TEST(SequentialTest, DescribesWhatWasChosenAndWhyNot) {
  Mlp mlp(SplitCase{{1, 1, 1, 1, 1}});
  EXPECT_EQ(
      mlp.layers(Fusion::kAuto).describe(),
      "layers 0-2: fused_grouped_mlp of GroupedLinear(5 experts, 20 -> 24), ScaledSwiGLU(interleave 0), "
      "GroupedLinear(5 experts, 12 -> 9); F32\n");
  const std::string off = mlp.layers(Fusion::kOff).describe();
  EXPECT_NE(
      off.find("layer 0: GroupedLinear(5 experts, 20 -> 24): one grouped GEMM; not fused: fusion is off"),
      off.npos)
      << off;
  const std::string loop = mlp.layers(Fusion::kAuto, GroupedProduct::kLoop).describe();
  EXPECT_NE(
      loop.find("one GEMM an expert; not fused: GroupedLinear(5 experts, 20 -> 24) runs one GEMM an expert"),
      loop.npos)
      << loop;
}

TEST(SequentialTest, ThrowsWhereARequiredFusionIsImpossible) {
  Mlp mlp(SplitCase{{1, 1, 1, 1, 1}});
  EXPECT_NO_THROW(mlp.layers(Fusion::kRequired));
  EXPECT_THROW(mlp.layers(Fusion::kRequired, GroupedProduct::kLoop), Error);
  const GroupedLinear linear{.w_EOI = mlp.up.view()};
  try {
    Sequential(Device::kCpu, DType::kF32, {linear, ScaledSwiGLU{}}, Fusion::kRequired);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kUser);
    EXPECT_NE(std::string(error.what()).find("no GroupedLinear -> ScaledSwiGLU -> GroupedLinear"),
              std::string::npos)
        << error.what();
  }
}

TEST(SequentialTest, RefusesLayersThatDoNotFit) {
  Mlp mlp(SplitCase{{1, 1, 1, 1, 1}});
  Tensor<float> few(Shape{kExperts - 1, kOut, kWidth}), odd(Shape{kExperts, 7, kIn});
  const GroupedLinear up{.w_EOI = mlp.up.view()}, down{.w_EOI = mlp.down.view()};
  EXPECT_THROW(Sequential(Device::kCpu, DType::kF32, {}), Error);
  EXPECT_THROW(Sequential(Device::kCpu, DType::kF32, {up, down}), Error);              // widths
  EXPECT_THROW(Sequential(Device::kCpu, DType::kF32, {ScaledSwiGLU{}, down}), Error);  // order
  EXPECT_THROW(Sequential(Device::kCpu, DType::kF32, {up, ScaledSwiGLU{.interleave = 5}, down}), Error);
  EXPECT_THROW(
      Sequential(Device::kCpu, DType::kF32, {up, ScaledSwiGLU{}, GroupedLinear{.w_EOI = few.view()}}), Error);
  EXPECT_THROW(Sequential(Device::kCpu, DType::kF32, {GroupedLinear{.w_EOI = odd.view()}, ScaledSwiGLU{}}),
               Error);
}

}  // namespace
}  // namespace biomoe::test
