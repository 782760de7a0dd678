#include "biomoe/ops/router.h"

#include "tests/ops/op_test.h"
#include "tests/ref/router.h"

namespace biomoe::test {
namespace {

struct Sizes {
  int64_t tokens, num_experts, top_k;
};

struct Outputs {
  Tensor<float> probs, weights, lse;
  Tensor<int32_t> experts;
  Tensor<int64_t> counts;
  Tensor<double> prob_sums, z_sum;

  explicit Outputs(const Sizes& s)
      : probs(Shape{s.tokens, s.num_experts}, 2),
        weights(Shape{s.tokens, s.top_k}),
        lse(Shape{s.tokens}),
        experts(Shape{s.tokens, s.top_k}),
        counts(Shape{s.num_experts}),
        prob_sums(Shape{s.num_experts}),
        z_sum(Shape{1}) {
    counts.fill(3);
    prob_sums.fill(0.5);
    z_sum.fill(0.25);
  }
  RouterForwardArgs args(TensorView logits) {
    return {.logits_TE = logits,
            .probs_TE = probs.view(),
            .experts_Tk = experts.view(),
            .weights_Tk = weights.view(),
            .lse_T = lse.view(),
            .counts_E = counts.view(),
            .prob_sums_E = prob_sums.view(),
            .z_sum_1 = z_sum.view()};
  }
  bool same_bits(const Outputs& other) const {
    return probs.same_bits(other.probs) && weights.same_bits(other.weights) && lse.same_bits(other.lse) &&
           experts.same_bits(other.experts) && counts.same_bits(other.counts) &&
           prob_sums.same_bits(other.prob_sums) && z_sum.same_bits(other.z_sum);
  }
};

class RouterTest : public testing::TestWithParam<Sizes> {};

TEST_P(RouterTest, ForwardMatchesReferenceForAnyNumberOfThreads) {
  const Sizes sizes = GetParam();
  Tensor<float> logits(Shape{sizes.tokens, sizes.num_experts}, 3);
  logits.fill_normal(1, 2.0);
  const auto want =
      ref::route(logits.values(), static_cast<size_t>(sizes.num_experts), static_cast<size_t>(sizes.top_k));
  std::vector<double> counts(static_cast<size_t>(sizes.num_experts), 3.0), prob_sums(counts.size(), 0.5);
  for (int32_t expert : want.experts) counts[static_cast<size_t>(expert)] += 1.0;
  for (size_t i = 0; i < want.probs.size(); ++i) prob_sums[i % prob_sums.size()] += want.probs[i];
  const double z_sum = 0.25 + ref::dot(want.lse, want.lse);
  Outputs first(sizes);
  for (int threads : {1, 2, 3}) {
    TestContext ctx(threads);
    Outputs out(sizes);
    router_forward(*ctx, out.args(logits.view()));
    EXPECT_CLOSE(out.probs.values(), want.probs, DType::kF32);
    EXPECT_EQ(out.experts.elements(), want.experts);
    EXPECT_CLOSE(out.weights.values(), want.weights, DType::kF32);
    EXPECT_CLOSE(out.lse.values(), want.lse, DType::kF32);
    EXPECT_EQ(out.counts.values(), counts);
    EXPECT_CLOSE(out.prob_sums.values(), prob_sums, DType::kF32);
    EXPECT_CLOSE(out.z_sum.values(), std::vector<double>(1, z_sum), DType::kF32);
    EXPECT_TRUE(out.probs.padding_untouched() && out.experts.padding_untouched() &&
                out.weights.padding_untouched() && out.counts.padding_untouched() &&
                out.prob_sums.padding_untouched());
    if (threads == 1) first = out;
    EXPECT_TRUE(out.same_bits(first)) << threads << " threads";
  }
}

TEST_P(RouterTest, BackwardMatchesReferenceForAnyNumberOfThreads) {
  const Sizes sizes = GetParam();
  Tensor<float> logits(Shape{sizes.tokens, sizes.num_experts}), balance(Shape{sizes.num_experts});
  Tensor<float> dweights(Shape{sizes.tokens, sizes.top_k});
  logits.fill_normal(1, 2.0);
  balance.fill_normal(2);
  dweights.fill_normal(3);
  Outputs out(sizes);
  {
    TestContext ctx(1);
    router_forward(*ctx, out.args(logits.view()));
  }
  for (bool with_balance : {false, true}) {
    ref::RouterLoss loss{dweights.values(), balance.values(), 0.125};
    if (!with_balance) std::fill(loss.balance.begin(), loss.balance.end(), 0.0);
    const auto want = ref::router_backward(logits.values(), static_cast<size_t>(sizes.num_experts),
                                           out.experts.elements(), static_cast<size_t>(sizes.top_k), loss);
    Tensor<float> first(logits.shape(), 1);
    for (int threads : {1, 2}) {
      TestContext ctx(threads);
      Tensor<float> dlogits(logits.shape(), 1);
      router_backward(*ctx, {.probs_TE = out.probs.view(),
                             .experts_Tk = out.experts.view(),
                             .weights_Tk = out.weights.view(),
                             .lse_T = out.lse.view(),
                             .dweights_Tk = dweights.view(),
                             .balance_E = with_balance ? balance.view() : TensorView(),
                             .z_scale = loss.z_scale,
                             .dlogits_TE = dlogits.view()});
      EXPECT_CLOSE(dlogits.values(), want, DType::kF32);
      EXPECT_TRUE(dlogits.padding_untouched());
      if (threads == 1) first = dlogits;
      EXPECT_TRUE(dlogits.same_bits(first));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, RouterTest,
                         testing::Values(Sizes{0, 8, 2}, Sizes{1, 1, 1}, Sizes{700, 8, 2}, Sizes{33, 15, 1},
                                         Sizes{40, 16, 16}, Sizes{41, 17, 3}, Sizes{300, 64, 6},
                                         Sizes{5, 1021, 64}));

TEST(RouterTest, ManyExpertsAreSelectedInOrder) {
  const Sizes sizes{3, 4096, 64};
  Tensor<float> logits(Shape{sizes.tokens, sizes.num_experts});
  logits.fill_normal(1);
  for (int64_t e = 0; e < sizes.num_experts; ++e) {
    logits.at(1, e) = 0.001f * static_cast<float>(e);   // rising: every expert displaces an earlier one
    logits.at(2, e) = -0.001f * static_cast<float>(e);  // falling: the first k stay
  }
  Outputs out(sizes);
  TestContext ctx(2);
  router_forward(*ctx, out.args(logits.view()));
  EXPECT_EQ(out.experts.elements(), ref::route(logits.values(), 4096, 64).experts);
}

TEST(RouterTest, TiesGoToTheLowestExpert) {
  const Sizes sizes{2, 9, 4};
  Tensor<float> logits(Shape{sizes.tokens, sizes.num_experts});
  logits.set({1, 1, 1, 1, 1, 1, 1, 1, 1,  //
              0, 2, 1, 2, 0, 1, 2, 0, 1});
  Outputs out(sizes);
  TestContext ctx(1);
  router_forward(*ctx, out.args(logits.view()));
  EXPECT_EQ(out.experts.elements(), (std::vector<int32_t>{0, 1, 2, 3, 1, 3, 6, 2}));
  EXPECT_EQ(out.weights.at(0, 3), 0.25f);
}

TEST(RouterTest, LogitsThatRoundToEqualProbabilitiesTie) {
  Tensor<float> logits(Shape{1, 3});
  // The last two differ, but both probabilities are 0 in single precision.
  logits.set({0.0, -300.0, -200.0});
  Outputs out({1, 3, 2});
  TestContext ctx(1);
  router_forward(*ctx, out.args(logits.view()));
  EXPECT_EQ(out.experts.elements(), (std::vector<int32_t>{0, 1}));
  EXPECT_EQ(out.weights.elements(), (std::vector<float>{1.0f, 0.0f}));
}

TEST(RouterTest, RowsWithNanKeepValidExpertsAndNanWeights) {
  const Sizes sizes{5, 5, 2};
  const double nan = std::nan("");
  Tensor<float> logits(Shape{sizes.tokens, sizes.num_experts});
  logits.set({nan,       nan,       nan,       nan,       nan,  //
              nan,       1,         3,         nan,       2,    //
              nan,       nan,       nan,       nan,       7,    //
              0,         1,         2,         3,         4,    //
              -INFINITY, -INFINITY, -INFINITY, -INFINITY, -INFINITY});
  Outputs out(sizes);
  TestContext ctx(1);
  router_forward(*ctx, out.args(logits.view()));
  EXPECT_EQ(out.experts.elements(), (std::vector<int32_t>{0, 1, 2, 4, 4, 0, 4, 3, 0, 1}));
  for (int64_t t : {0, 1, 2, 4}) {
    EXPECT_TRUE(std::isnan(out.weights.at(t, 0)) && std::isnan(out.weights.at(t, 1))) << t;
    for (int64_t e = 0; e < 5; ++e) EXPECT_TRUE(std::isnan(out.probs.at(t, e))) << t;
  }
  EXPECT_TRUE(std::isfinite(out.weights.at(3, 0)) && std::isfinite(out.weights.at(3, 1)));
  EXPECT_TRUE(std::isnan(out.z_sum.at(0)));
}

TEST(RouterTest, TopOneHasWeightOneAndNoGradientThroughIt) {
  const Sizes sizes{50, 7, 1};
  Tensor<float> logits(Shape{sizes.tokens, sizes.num_experts}), dweights(Shape{sizes.tokens, 1});
  logits.fill_normal(1, 10.0);
  dweights.fill_normal(2, 1e3);
  Outputs out(sizes);
  TestContext ctx(1);
  router_forward(*ctx, out.args(logits.view()));
  for (float weight : out.weights.elements()) EXPECT_EQ(weight, 1.0f);
  Tensor<float> dlogits(logits.shape());
  router_backward(*ctx, {.probs_TE = out.probs.view(),
                         .experts_Tk = out.experts.view(),
                         .weights_Tk = out.weights.view(),
                         .lse_T = out.lse.view(),
                         .dweights_Tk = dweights.view(),
                         .balance_E = {},
                         .dlogits_TE = dlogits.view()});
  for (float value : dlogits.elements()) EXPECT_EQ(value, 0.0f);
}

TEST(RouterTest, StatisticsAreTheSameHoweverTheBatchIsCut) {
  const Sizes sizes{101, 6, 2};
  Tensor<float> logits(Shape{sizes.tokens, sizes.num_experts});
  logits.fill_normal(1);
  TestContext ctx(2);
  Outputs whole(sizes);
  router_forward(*ctx, whole.args(logits.view()));
  Outputs parts(sizes);
  const RouterForwardArgs all = parts.args(logits.view());
  for (const auto& [begin, count] : {std::pair<int64_t, int64_t>{0, 10}, {10, 0}, {10, 90}, {100, 1}}) {
    RouterForwardArgs part = all;
    for (auto member :
         {&RouterForwardArgs::logits_TE, &RouterForwardArgs::probs_TE, &RouterForwardArgs::experts_Tk,
          &RouterForwardArgs::weights_Tk, &RouterForwardArgs::lse_T}) {
      part.*member = (all.*member).rows(begin, count);
    }
    router_forward(*ctx, part);
  }
  EXPECT_TRUE(parts.same_bits(whole));
}

TEST(RouterTest, RefusesMoreSlotsThanExpertsAndExpertsOutOfRange) {
  TestContext ctx(1);
  Tensor<float> logits(Shape{2, 3});
  logits.fill(0);
  Outputs too_many({2, 3, 4});
  EXPECT_THROW(router_forward(*ctx, too_many.args(logits.view())), Error);
  Outputs out({2, 3, 2});
  router_forward(*ctx, out.args(logits.view()));
  for (int32_t bad : {-1, 3}) {
    out.experts.at(1, 1) = bad;
    EXPECT_THROW(router_backward(*ctx, {.probs_TE = out.probs.view(),
                                        .experts_Tk = out.experts.view(),
                                        .weights_Tk = out.weights.view(),
                                        .lse_T = out.lse.view(),
                                        .dweights_Tk = out.weights.view(),
                                        .balance_E = {},
                                        .dlogits_TE = logits.view()}),
                 Error);
  }
}

TEST(RouterReferenceTest, GradientIsThatOfFiniteDifferences) {
  for (size_t top_k : {1, 2, 5}) {
    Tensor<double> logits(Shape{4, 5}), dweights(Shape{4, static_cast<int64_t>(top_k)}), balance(Shape{5});
    logits.fill_normal(1);
    dweights.fill_normal(2);
    balance.fill_normal(3);
    const ref::RouterLoss loss{dweights.values(), balance.values(), 0.3};
    const auto experts = ref::route(logits.values(), 5, top_k).experts;
    const auto of_logits = [&](const ref::Vector& x) {
      return ref::router_loss(ref::route(x, 5, top_k, experts), loss);
    };
    EXPECT_LE(ref::gradient_error(of_logits, logits.values(),
                                  ref::router_backward(logits.values(), 5, experts, top_k, loss)),
              ref::kGradientTolerance);
  }
}

}  // namespace
}  // namespace biomoe::test
