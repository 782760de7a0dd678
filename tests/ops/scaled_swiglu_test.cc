#include "biomoe/ops/scaled_swiglu.h"

#include "tests/ops/op_test.h"
#include "tests/ref/scaled_swiglu.h"

namespace biomoe::test {
namespace {

struct Sizes {
  int64_t rows, width;
};

class ScaledSwigluTest : public testing::TestWithParam<Sizes> {};

TEST_P(ScaledSwigluTest, MatchesReferenceForAnyNumberOfThreads) {
  const auto [rows, width] = GetParam();
  Tensor<float> gate_up(Shape{rows, 2 * width}, 3), probs(Shape{rows}), dact(Shape{rows, width}, 1);
  gate_up.fill_normal(1, 3.0);
  probs.fill_normal(2, 0.2, 0.5);
  dact.fill_normal(3);
  const auto want_act = ref::scaled_swiglu(gate_up.values(), probs.values(), static_cast<size_t>(width));
  const auto want = ref::scaled_swiglu_backward(dact.values(), gate_up.values(), probs.values(),
                                                static_cast<size_t>(width));
  Tensor<float> first(gate_up.shape(), 3), first_dprobs(probs.shape());
  for (int threads : {1, 2, 3}) {
    TestContext ctx(threads);
    Tensor<float> act(Shape{rows, width}, 2);
    scaled_swiglu_forward(*ctx,
                          {.gate_up_R2F = gate_up.view(), .probs_R = probs.view(), .act_RF = act.view()});
    EXPECT_CLOSE(act.values(), want_act, DType::kF32);
    EXPECT_TRUE(act.padding_untouched());
    Tensor<float> dgate_up(gate_up.shape(), 3), dprobs(Shape{rows}), in_place = gate_up;
    ScaledSwigluBackwardArgs args{.dact_RF = dact.view(),
                                  .gate_up_R2F = gate_up.view(),
                                  .probs_R = probs.view(),
                                  .dgate_up_R2F = dgate_up.view(),
                                  .dprobs_R = dprobs.view()};
    scaled_swiglu_backward(*ctx, args);
    EXPECT_CLOSE(dgate_up.values(), want.dgate_up, DType::kF32);
    EXPECT_CLOSE(dprobs.values(), want.dprobs, DType::kF32);
    EXPECT_TRUE(dgate_up.padding_untouched() && dprobs.padding_untouched());
    if (threads == 1) {
      first = dgate_up;
      first_dprobs = dprobs;
    }
    EXPECT_TRUE(dgate_up.same_bits(first) && dprobs.same_bits(first_dprobs)) << threads << " threads";
    args.gate_up_R2F = args.dgate_up_R2F = in_place.view();
    scaled_swiglu_backward(*ctx, args);
    EXPECT_TRUE(in_place.same_bits(first) && dprobs.same_bits(first_dprobs));
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, ScaledSwigluTest,
                         testing::Values(Sizes{0, 8}, Sizes{1, 1}, Sizes{3, 15}, Sizes{40, 16}, Sizes{41, 17},
                                         Sizes{129, 100}));

TEST(ScaledSwigluTest, LargeGatesSaturateWithoutNan) {
  TestContext ctx(1);
  Tensor<float> gate_up(Shape{1, 6}), probs(Shape{1}), act(Shape{1, 3}), dact(Shape{1, 3});
  gate_up.set({-1e30, -200.0, 200.0, 2.0, 2.0, 2.0});
  probs.fill(0.5f);
  dact.fill(1);
  scaled_swiglu_forward(*ctx, {.gate_up_R2F = gate_up.view(), .probs_R = probs.view(), .act_RF = act.view()});
  EXPECT_EQ(act.at(0, 0), 0.0f);
  EXPECT_EQ(act.at(0, 1), 0.0f);
  EXPECT_EQ(act.at(0, 2), 200.0f);
  Tensor<float> dgate_up(Shape{1, 6}), dprobs(Shape{1});
  scaled_swiglu_backward(*ctx, {.dact_RF = dact.view(),
                                .gate_up_R2F = gate_up.view(),
                                .probs_R = probs.view(),
                                .dgate_up_R2F = dgate_up.view(),
                                .dprobs_R = dprobs.view()});
  EXPECT_EQ(dgate_up.values(), (std::vector<double>{0.0, 0.0, 1.0, 0.0, 0.0, 100.0}));
  EXPECT_EQ(dprobs.at(0), 400.0f);
}

TEST(ScaledSwigluTest, RefusesWrongShapes) {
  TestContext ctx(1);
  Tensor<float> gate_up(Shape{2, 6}), probs(Shape{2}), act(Shape{2, 4});
  EXPECT_THROW(scaled_swiglu_forward(
                   *ctx, {.gate_up_R2F = gate_up.view(), .probs_R = probs.view(), .act_RF = act.view()}),
               Error);
}

TEST(ScaledSwigluReferenceTest, GradientIsThatOfFiniteDifferences) {
  Tensor<double> gate_up(Shape{3, 8}), probs(Shape{3}), dact(Shape{3, 4});
  gate_up.fill_normal(1);
  probs.fill_normal(2);
  dact.fill_normal(3);
  const auto got = ref::scaled_swiglu_backward(dact.values(), gate_up.values(), probs.values(), 4);
  const auto of_gate_up = [&](const ref::Vector& x) {
    return ref::dot(ref::scaled_swiglu(x, probs.values(), 4), dact.values());
  };
  const auto of_probs = [&](const ref::Vector& p) {
    return ref::dot(ref::scaled_swiglu(gate_up.values(), p, 4), dact.values());
  };
  EXPECT_LE(ref::gradient_error(of_gate_up, gate_up.values(), got.dgate_up), ref::kGradientTolerance);
  EXPECT_LE(ref::gradient_error(of_probs, probs.values(), got.dprobs), ref::kGradientTolerance);
}

}  // namespace
}  // namespace biomoe::test
