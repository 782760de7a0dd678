#include "biomoe/ops/cross_entropy.h"

#include "tests/ops/op_test.h"
#include "tests/ref/cross_entropy.h"

namespace biomoe::test {
namespace {

struct Sizes {
  int64_t tokens, vocabulary;
};

struct Inputs {
  Tensor<float> logits, weights;
  Tensor<int32_t> targets;

  // Every third target is ignored by its id, every fourth by its weight.
  Inputs(const Sizes& sizes, double spread)
      : logits(Shape{sizes.tokens, sizes.vocabulary}, 3),
        weights(Shape{sizes.tokens}),
        targets(Shape{sizes.tokens}) {
    logits.fill_normal(1, spread);
    weights.fill_normal(2, 0.1, 1.0);
    targets.fill_ids(3, sizes.vocabulary);
    for (int64_t t = 0; t < sizes.tokens; ++t) {
      if (t % 3 == 2) targets.at(t) = t % 2 ? -1 : -100;
      if (t % 4 == 3) weights.at(t) = 0.0f;
    }
  }
  // The operation must not read ignored rows.
  void poison_ignored() {
    for (int64_t t = 0; t < targets.size(); ++t) {
      if (targets.at(t) >= 0 && weights.at(t) != 0.0f) continue;
      for (int64_t v = 0; v < logits.shape()[1]; ++v) logits.at(t, v) = std::nanf("");
    }
  }
};

class CrossEntropyTest : public testing::TestWithParam<Sizes> {};

TEST_P(CrossEntropyTest, MatchesReferenceForAnyNumberOfThreads) {
  constexpr double kGradScale = 0.25;
  for (double spread : {1.0, 30.0}) {
    Inputs in(GetParam(), spread);
    const auto want = ref::cross_entropy(in.logits.values(), in.targets.elements(), in.weights.values(),
                                         static_cast<size_t>(GetParam().vocabulary));
    auto want_dlogits = want.dlogits;
    for (double& value : want_dlogits) value *= kGradScale;
    in.poison_ignored();
    Tensor<float> first(in.logits.shape(), 3);
    for (int threads : {1, 2}) {
      TestContext ctx(threads);
      Tensor<float> nll(Shape{GetParam().tokens}), logits = in.logits;
      Tensor<double> grad_scale(Shape{1});
      grad_scale.fill(kGradScale);
      CrossEntropyArgs args{.logits_TV = logits.view(),
                            .targets_T = in.targets.view(),
                            .weights_T = in.weights.view(),
                            .nll_T = nll.view(),
                            .grad_scale_1 = grad_scale.view()};
      cross_entropy(*ctx, args);
      EXPECT_CLOSE(nll.values(), want.nll, DType::kF32);
      EXPECT_TRUE(logits.same_bits(in.logits)) << "read only without write_gradient";
      args.write_gradient = true;
      nll.fill(std::nanf(""));
      cross_entropy(*ctx, args);
      EXPECT_CLOSE(nll.values(), want.nll, DType::kF32);
      EXPECT_CLOSE(logits.values(), want_dlogits, DType::kF32);
      EXPECT_TRUE(logits.padding_untouched() && nll.padding_untouched());
      if (threads == 1) first = logits;
      EXPECT_TRUE(logits.same_bits(first));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, CrossEntropyTest,
                         testing::Values(Sizes{0, 16}, Sizes{1, 2}, Sizes{9, 15}, Sizes{300, 16},
                                         Sizes{31, 17}, Sizes{2, 1}, Sizes{80, 333}, Sizes{5, 32003}));

TEST(CrossEntropyTest, IsStableForHugeLogitsAndKeepsTheDigitsOfAGoodPrediction) {
  TestContext ctx(1);
  Tensor<double> one(Shape{1});
  one.fill(1);
  Tensor<float> logits(Shape{2, 3}), weights(Shape{2}), nll(Shape{2});
  Tensor<int32_t> targets(Shape{2});
  logits.set({3e38, -3e38, 0.0, 16.0, 0.0, 0.0});
  weights.fill(1);
  targets.fill(0);
  cross_entropy(*ctx, {.logits_TV = logits.view(),
                       .targets_T = targets.view(),
                       .weights_T = weights.view(),
                       .nll_T = nll.view(),
                       .grad_scale_1 = one.view(),
                       .write_gradient = true});
  EXPECT_EQ(nll.at(0), 0.0f);
  EXPECT_EQ(logits.at(0, 0), 0.0f);
  const double rest = 2.0 * std::exp(-16.0);
  EXPECT_NEAR(nll.at(1), std::log1p(rest), 1.3e-7);  // one rounding of the sum at 1
  EXPECT_NEAR(logits.at(1, 0), -rest / (1.0 + rest), 1.3e-7);
}

TEST(CrossEntropyTest, NanAndInfinityInAUsedRowReachItsLossOnly) {
  for (float bad : {std::nanf(""), INFINITY}) {
    for (int64_t at : {0, 7, 16}) {
      TestContext ctx(1);
      Tensor<double> one(Shape{1});
      one.fill(1);
      Tensor<float> logits(Shape{3, 17}), weights(Shape{3}), nll(Shape{3});
      Tensor<int32_t> targets(Shape{3});
      logits.fill_normal(1).at(1, at) = bad;
      weights.fill(1);
      targets.fill(3);
      cross_entropy(*ctx, {.logits_TV = logits.view(),
                           .targets_T = targets.view(),
                           .weights_T = weights.view(),
                           .nll_T = nll.view(),
                           .grad_scale_1 = one.view(),
                           .write_gradient = true});
      EXPECT_TRUE(std::isnan(nll.at(1)));
      EXPECT_TRUE(std::isnan(logits.at(1, 3)));
      EXPECT_TRUE(std::isfinite(nll.at(0)) && std::isfinite(nll.at(2)));
    }
  }
}

TEST(CrossEntropyTest, RefusesTargetsAboveTheVocabularyBeforeWriting) {
  TestContext ctx(1);
  Tensor<double> one(Shape{1});
  one.fill(1);
  Tensor<float> logits(Shape{2, 4}), weights(Shape{2}), nll(Shape{2});
  Tensor<int32_t> targets(Shape{2});
  logits.fill(1);
  weights.fill(1);
  targets.fill(0).at(1) = 4;
  const Tensor<float> before = logits;
  EXPECT_THROW(cross_entropy(*ctx, {.logits_TV = logits.view(),
                                    .targets_T = targets.view(),
                                    .weights_T = weights.view(),
                                    .nll_T = nll.view(),
                                    .grad_scale_1 = one.view(),
                                    .write_gradient = true}),
               Error);
  EXPECT_TRUE(logits.same_bits(before));
}

TEST(CrossEntropyReferenceTest, GradientIsThatOfFiniteDifferences) {
  Tensor<double> logits(Shape{4, 5}), weights(Shape{4});
  logits.fill_normal(1);
  weights.fill_normal(2);
  const std::vector<int32_t> targets = {4, -1, 0, 2};
  const auto loss = [&](const ref::Vector& x) {
    return ref::dot(ref::cross_entropy(x, targets, weights.values(), 5).nll, weights.values());
  };
  EXPECT_LE(ref::gradient_error(loss, logits.values(),
                                ref::cross_entropy(logits.values(), targets, weights.values(), 5).dlogits),
            ref::kGradientTolerance);
}

}  // namespace
}  // namespace biomoe::test
