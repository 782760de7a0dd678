// The auxiliary losses against their formulas and central differences.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "biomoe/core/rng.h"
#include "biomoe/moe/routing_stats.h"
#include "biomoe/ops/router.h"

namespace biomoe {
namespace {

struct Case {
  int64_t layers, experts, top_k, tokens;
};

// Probabilities [layers][tokens][experts] and the experts chosen from them by `statistics`.
std::vector<double> random_probs(const Case& c) {
  const Rng rng(3, RngStream::kTest);
  std::vector<double> probs(static_cast<size_t>(c.layers * c.tokens * c.experts));
  for (size_t row = 0; row < probs.size(); row += static_cast<size_t>(c.experts)) {
    double sum = 0;
    for (size_t e = row; e < row + static_cast<size_t>(c.experts); ++e)
      sum += probs[e] = std::exp(rng.normal(e));
    for (size_t e = row; e < row + static_cast<size_t>(c.experts); ++e) probs[e] /= sum;
  }
  return probs;
}

// Token t goes to experts t*t, t*t + 1, ... (mod E): uneven, whatever the probabilities are.
int64_t expert_of(const Case& c, int64_t token, int64_t slot) {
  return (token * token + slot) % c.experts;
}

struct Losses {
  double balance = 0, z = 0;
  std::vector<float> gradient;
};

Losses losses_of(const RoutingStats& stats, BalanceOver over, double coef = 0) {
  Context ctx;
  double losses[2] = {NAN, NAN};
  Losses result;
  result.gradient.assign(static_cast<size_t>(stats.counts_LE.num_elements()), NAN);
  balance_loss(ctx, {.counts_LE = stats.counts_LE,
                     .prob_sums_LE = stats.prob_sums_LE,
                     .z_sums_L = stats.z_sums_L,
                     .tokens = stats.tokens,
                     .over = over,
                     .balance_coef = coef,
                     .losses_2 = TensorView(losses, DType::kF64, {2}),
                     .balance_LE = TensorView(result.gradient.data(), DType::kF32, stats.counts_LE.shape)});
  result.balance = losses[0];
  result.z = losses[1];
  return result;
}

void reset(RoutingStats& stats) {
  Context ctx;
  reset_routing_stats(ctx, stats);
}

RoutingStats statistics(Arena& arena, const Case& c, const std::vector<double>& probs) {
  RoutingStats stats = allocate_routing_stats(arena, c.layers, c.experts);
  reset(stats);
  stats.tokens = c.tokens;
  for (int64_t layer = 0; layer < c.layers; ++layer) {
    for (int64_t t = 0; t < c.tokens; ++t) {
      for (int64_t e = 0; e < c.experts; ++e) {
        stats.prob_sums_LE.f64()[layer * c.experts + e] +=
            probs[static_cast<size_t>((layer * c.tokens + t) * c.experts + e)];
      }
      for (int64_t k = 0; k < c.top_k; ++k) ++stats.counts_LE.i64()[layer * c.experts + expert_of(c, t, k)];
    }
  }
  return stats;
}

// As written in the model's definition: a one-hot tensor over (token of any layer, slot, expert), its mean
// over tokens, times the mean probability, summed over slots and experts, times E.
double loss_of_rows(const Case& c, const std::vector<double>& probs, int64_t begin, int64_t end) {
  const double rows = static_cast<double>(end - begin);
  double loss = 0;
  for (int64_t k = 0; k < c.top_k; ++k) {
    for (int64_t e = 0; e < c.experts; ++e) {
      double chosen = 0, probability = 0;
      for (int64_t row = begin; row < end; ++row) {
        chosen += expert_of(c, row % c.tokens, k) == e ? 1 : 0;
        probability += probs[static_cast<size_t>(row * c.experts + e)];
      }
      loss += chosen / rows * (probability / rows);
    }
  }
  return loss * static_cast<double>(c.experts);
}

double direct_loss(const Case& c, const std::vector<double>& probs, BalanceOver over) {
  if (over == BalanceOver::kAllLayers) return loss_of_rows(c, probs, 0, c.layers * c.tokens);
  double sum = 0;
  for (int64_t layer = 0; layer < c.layers; ++layer)
    sum += loss_of_rows(c, probs, layer * c.tokens, (layer + 1) * c.tokens);
  return sum / static_cast<double>(c.layers);
}

constexpr BalanceOver kBoth[] = {BalanceOver::kAllLayers, BalanceOver::kEachLayer};
const Case kCases[] = {{1, 1, 1, 1}, {1, 4, 1, 7}, {3, 5, 2, 33}, {2, 8, 8, 12}, {4, 64, 6, 100}};

TEST(BalanceLoss, EqualsTheFormula) {
  for (const Case& c : kCases) {
    Arena arena(1 << 20);
    const auto probs = random_probs(c);
    for (const BalanceOver over : kBoth) {
      EXPECT_NEAR(losses_of(statistics(arena, c, probs), over).balance, direct_loss(c, probs, over), 1e-12)
          << c.experts << " experts";
    }
  }
}

TEST(BalanceLoss, KnownValues) {
  for (const BalanceOver over : kBoth) {
    Arena arena(1 << 20);
    RoutingStats stats = allocate_routing_stats(arena, 2, 4);
    reset(stats);
    EXPECT_EQ(losses_of(stats, over).balance, 0.0);  // nothing routed
    EXPECT_EQ(losses_of(stats, over).z, 0.0);
    stats.tokens = 8;
    for (int64_t i = 0; i < 8; ++i) {
      stats.counts_LE.i64()[i] = 4;  // 8 tokens, top 2, even
      stats.prob_sums_LE.f64()[i] = 2.0;
    }
    EXPECT_DOUBLE_EQ(losses_of(stats, over).balance, 2.0);  // k when even
    reset(stats);
    stats.tokens = 8;
    for (const int64_t layer : {0, 1}) {
      stats.counts_LE.i64()[layer * 4 + 3] = 8;  // top 1, all tokens and all probability on one expert
      stats.prob_sums_LE.f64()[layer * 4 + 3] = 8.0;
      stats.z_sums_L.f64()[layer] = 24.0;
    }
    EXPECT_DOUBLE_EQ(losses_of(stats, over).balance, 4.0);  // E when all on one
    EXPECT_DOUBLE_EQ(losses_of(stats, over).z, 3.0);
  }
}

// Each layer sends everything to an expert of its own: even over both together, and as uneven as can be in
// each.
TEST(BalanceLoss, LayersThatCollapseCountInEach) {
  Arena arena(1 << 20);
  RoutingStats stats = allocate_routing_stats(arena, 2, 2);
  reset(stats);
  stats.tokens = 8;
  for (const int64_t layer : {0, 1}) {
    stats.counts_LE.i64()[layer * 2 + layer] = 8;
    stats.prob_sums_LE.f64()[layer * 2 + layer] = 8.0;
  }
  EXPECT_DOUBLE_EQ(losses_of(stats, BalanceOver::kAllLayers).balance, 1.0);
  EXPECT_DOUBLE_EQ(losses_of(stats, BalanceOver::kEachLayer).balance, 2.0);
}

TEST(BalanceLoss, GradientEqualsCentralDifferences) {
  constexpr double kCoef = 0.7, kStep = 1e-4;
  for (const Case& c : kCases) {
    auto probs = random_probs(c);
    Arena arena(1 << 20);
    for (const BalanceOver over : kBoth) {
      const std::vector<float> gradient = losses_of(statistics(arena, c, probs), over, kCoef).gradient;
      for (const int64_t row : {int64_t{0}, c.layers * c.tokens - 1}) {
        for (int64_t e = 0; e < std::min<int64_t>(c.experts, 8); ++e) {
          double& value = probs[static_cast<size_t>(row * c.experts + e)];
          const double start = value;
          value = start + kStep;
          const double high = direct_loss(c, probs, over);
          value = start - kStep;
          const double low = direct_loss(c, probs, over);
          value = start;
          const double numeric = kCoef * (high - low) / (2 * kStep);
          const int64_t layer = row / c.tokens;
          EXPECT_NEAR(static_cast<double>(gradient[static_cast<size_t>(layer * c.experts + e)]), numeric,
                      1e-6 * std::abs(numeric) + 1e-10);
        }
      }
    }
  }
}

}  // namespace
}  // namespace biomoe
