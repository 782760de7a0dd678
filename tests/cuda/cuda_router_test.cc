#include "biomoe/ops/router.h"
#include "tests/cuda/gpu_test.h"
#include "tests/ref/router.h"

namespace biomoe::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

struct Routed {
  GpuTensor probs, experts, weights, lse, counts, prob_sums, z_sum;

  Routed(Context& ctx, int64_t tokens, int64_t num_experts, int64_t top_k)
      : probs(ctx, DType::kF32, Shape{tokens, num_experts}, 3),
        experts(ctx, DType::kI32, Shape{tokens, top_k}),
        weights(ctx, DType::kF32, Shape{tokens, top_k}),
        lse(ctx, DType::kF32, Shape{tokens}),
        counts(ctx, DType::kI64, Shape{num_experts}),
        prob_sums(ctx, DType::kF64, Shape{num_experts}),
        z_sum(ctx, DType::kF64, Shape{1}) {
    counts.fill(5);
    prob_sums.fill(0.5);
    z_sum.fill(0.25);
  }
  void run(Context& ctx, const GpuTensor& logits) {
    router_forward(ctx, {.logits_TE = logits.view(),
                         .probs_TE = probs.view(),
                         .experts_Tk = experts.view(),
                         .weights_Tk = weights.view(),
                         .lse_T = lse.view(),
                         .counts_E = counts.view(),
                         .prob_sums_E = prob_sums.view(),
                         .z_sum_1 = z_sum.view()});
  }
};

std::vector<int32_t> integers(const std::vector<double>& values) {
  std::vector<int32_t> all;
  for (const double value : values) all.push_back(static_cast<int32_t>(value));
  return all;
}

struct Sizes {
  int64_t tokens, experts, top_k;
};

const std::vector<Sizes> kSizes = {{0, 8, 2},      {1, 1, 1},    {15, 8, 2},    {16, 8, 2},
                                   {17, 32, 4},    {33, 33, 8},  {64, 256, 8},  {40, 257, 3},
                                   {20, 1024, 40}, {3000, 8, 2}, {16385, 4, 1}, {50, 3, 3}};

using CudaRouterTest = GpuTest;

TEST_F(CudaRouterTest, ForwardMatchesReferenceAndRepeats) {
  for (const auto& [tokens, num_experts, top_k] : kSizes) {
    SCOPED_TRACE(fmt::format("{} tokens, {} of {}", tokens, top_k, num_experts));
    GpuTensor logits(ctx(), DType::kF32, Shape{tokens, num_experts}, 1);
    logits.set(normals(1, logits.size(), DType::kF32));
    Routed got(ctx(), tokens, num_experts, top_k), again(ctx(), tokens, num_experts, top_k);
    Context& scratch = with_scratch(router_forward_scratch_bytes(Device::kCuda, tokens, num_experts));
    got.run(scratch, logits);
    again.run(scratch, logits);
    const auto want =
        ref::route(logits.values(), static_cast<size_t>(num_experts), static_cast<size_t>(top_k));
    EXPECT_CLOSE(got.probs.values(), want.probs, DType::kF32);
    EXPECT_EQ(got.experts.values(), doubles(want.experts));
    EXPECT_CLOSE(got.weights.values(), want.weights, DType::kF32);
    EXPECT_CLOSE(got.lse.values(), want.lse, DType::kF32);
    EXPECT_TRUE(got.probs.padding_untouched() && got.experts.padding_untouched() &&
                got.weights.padding_untouched());
    std::vector<double> counts(static_cast<size_t>(num_experts), 5.0), sums(counts.size(), 0.5);
    double squares = 0.25;
    for (const int32_t expert : want.experts) ++counts[static_cast<size_t>(expert)];
    for (size_t i = 0; i < want.probs.size(); ++i) sums[i % sums.size()] += want.probs[i];
    for (const double lse : want.lse) squares += lse * lse;
    EXPECT_EQ(got.counts.values(), counts);
    EXPECT_CLOSE(got.prob_sums.values(), sums, DType::kF32);
    EXPECT_CLOSE(got.z_sum.values(), std::vector<double>{squares}, DType::kF32);
    EXPECT_EQ(again.weights.bytes(), got.weights.bytes());
    EXPECT_EQ(again.prob_sums.bytes(), got.prob_sums.bytes());
    EXPECT_EQ(again.z_sum.bytes(), got.z_sum.bytes());
  }
}

TEST_F(CudaRouterTest, TiesGoToTheLowestIndexAndNanNeverWins) {
  GpuTensor logits(ctx(), DType::kF32, Shape{6, 4});
  logits.set({1,     1,     1,    1,     //
              0,     2,     2,    0,     //
              kNan,  kNan,  kNan, kNan,  //
              kNan,  1,     kNan, 2,     //
              kInf,  1,     2,    3,     //
              -kInf, -kInf, 5,    -kInf});
  Routed got(ctx(), 6, 4, 2);
  got.run(with_scratch(router_forward_scratch_bytes(Device::kCuda, 6, 4)), logits);
  EXPECT_EQ(got.experts.values(), (std::vector<double>{0, 1, 1, 2, 0, 1, 3, 1, 0, 3, 2, 0}));
  const auto weights = got.weights.values();
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(weights[i], 0.5);
  for (size_t i = 4; i < 10; ++i) EXPECT_TRUE(std::isnan(weights[i])) << i;
  EXPECT_EQ(weights[10], 1.0);
  EXPECT_EQ(weights[11], 0.0);
}

TEST_F(CudaRouterTest, BackwardMatchesReference) {
  for (const DType dtype : kComputeTypes) {
    for (const auto& [tokens, num_experts, top_k] : kSizes) {
      if (tokens * num_experts * num_experts > 20000000) continue;
      SCOPED_TRACE(fmt::format("{} tokens, {} of {}", tokens, top_k, num_experts));
      const auto e = static_cast<size_t>(num_experts), k = static_cast<size_t>(top_k);
      GpuTensor logits(ctx(), DType::kF32, Shape{tokens, num_experts});
      logits.set(normals(1, logits.size(), DType::kF32));
      Routed routed(ctx(), tokens, num_experts, top_k);
      routed.run(with_scratch(router_forward_scratch_bytes(Device::kCuda, tokens, num_experts)), logits);
      GpuTensor dweights(ctx(), DType::kF32, Shape{tokens, top_k}),
          balance(ctx(), DType::kF32, Shape{num_experts});
      GpuTensor dlogits(ctx(), dtype, Shape{tokens, num_experts}, 2);
      dweights.set(normals(2, dweights.size(), DType::kF32));
      balance.set(normals(3, num_experts, DType::kF32));
      for (const bool with_balance : {true, false}) {
        router_backward(ctx(), {.probs_TE = routed.probs.view(),
                                .experts_Tk = routed.experts.view(),
                                .weights_Tk = routed.weights.view(),
                                .lse_T = routed.lse.view(),
                                .dweights_Tk = dweights.view(),
                                .balance_E = with_balance ? balance.view() : TensorView(),
                                .z_scale = 0.3,
                                .dlogits_TE = dlogits.view()});
        const ref::RouterLoss loss{dweights.values(), with_balance ? balance.values() : ref::Vector(e, 0.0),
                                   0.3};
        EXPECT_CLOSE(dlogits.values(),
                     ref::router_backward(logits.values(), e, integers(routed.experts.values()), k, loss),
                     dtype);
      }
      EXPECT_TRUE(dlogits.padding_untouched());
    }
  }
}

TEST_F(CudaRouterTest, OneSelectedExpertHasNoGradientThroughItsWeight) {
  GpuTensor logits(ctx(), DType::kF32, Shape{100, 8}), dweights(ctx(), DType::kF32, Shape{100, 1});
  GpuTensor dlogits(ctx(), DType::kF32, Shape{100, 8});
  logits.set(normals(1, 800, DType::kF32));
  dweights.set(normals(2, 100, DType::kF32));
  Routed routed(ctx(), 100, 8, 1);
  routed.run(with_scratch(router_forward_scratch_bytes(Device::kCuda, 100, 8)), logits);
  router_backward(ctx(), {.probs_TE = routed.probs.view(),
                          .experts_Tk = routed.experts.view(),
                          .weights_Tk = routed.weights.view(),
                          .lse_T = routed.lse.view(),
                          .dweights_Tk = dweights.view(),
                          .balance_E = {},
                          .dlogits_TE = dlogits.view()});
  EXPECT_EQ(dlogits.values(), std::vector<double>(800, 0.0));
}

TEST_F(CudaRouterTest, BalanceLossFollowsItsDefinition) {
  constexpr int64_t kLayers = 3, kExperts = 300, kTokens = 70;
  GpuTensor counts(ctx(), DType::kI64, Shape{kLayers, kExperts}),
      prob_sums(ctx(), DType::kF64, Shape{kLayers, kExperts});
  GpuTensor z_sums(ctx(), DType::kF64, Shape{kLayers}), losses(ctx(), DType::kF64, Shape{2});
  GpuTensor balance(ctx(), DType::kF32, Shape{kLayers, kExperts});
  counts.set(doubles(ids(1, counts.size(), 40)));
  prob_sums.set(normals(2, counts.size(), DType::kF64));
  z_sums.set({1, 2, 4});
  BalanceLossArgs args{.counts_LE = counts.view(),
                       .prob_sums_LE = prob_sums.view(),
                       .z_sums_L = z_sums.view(),
                       .tokens = kTokens,
                       .balance_coef = 0.02,
                       .losses_2 = losses.view(),
                       .balance_LE = balance.view()};
  balance_loss(ctx(), args);
  const auto count = counts.values(), sum = prob_sums.values();
  const double routings = kLayers * kTokens;
  double loss = 0;
  std::vector<double> want;
  for (size_t e = 0; e < kExperts; ++e) {
    const double f = (count[e] + count[e + kExperts] + count[e + 2 * kExperts]) / routings;
    loss += f * (sum[e] + sum[e + kExperts] + sum[e + 2 * kExperts]) / routings;
    want.push_back(0.02 * kExperts * f / routings);
  }
  for (size_t i = kExperts; i < kLayers * kExperts; ++i) want.push_back(want[i - kExperts]);
  EXPECT_CLOSE(losses.values(), (std::vector<double>{kExperts * loss, 7 / routings}), DType::kF64);
  EXPECT_CLOSE(balance.values(), want, DType::kF32);
  args.over = BalanceOver::kEachLayer;
  balance_loss(ctx(), args);
  loss = 0;
  for (size_t i = 0; i < kLayers * kExperts; ++i) {
    const double f = count[i] / kTokens;
    loss += f * sum[i] / routings;
    want[i] = 0.02 * kExperts * f / routings;
  }
  EXPECT_CLOSE(losses.values(), (std::vector<double>{kExperts * loss, 7 / routings}), DType::kF64);
  EXPECT_CLOSE(balance.values(), want, DType::kF32);
  args.tokens = 0;
  balance_loss(ctx(), args);
  EXPECT_EQ(losses.values(), (std::vector<double>{0, 0}));
  EXPECT_EQ(balance.values(), std::vector<double>(kLayers * kExperts, 0.0));
}

}  // namespace
}  // namespace biomoe::test
