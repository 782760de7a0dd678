// Gradients and auxiliary losses do not depend on how a global batch is split.
#include <gtest/gtest.h>

#include "tests/unit/model/model_test_util.h"

namespace biomoe {
namespace {

using test::accumulate;
using test::random_batch;
using test::small_config;
using test::small_limits;

// Records with 10, 500 and 0 valid targets.
Batch uneven_batch(const ModelConfig& config) {
  Batch batch = random_batch(config, {31, 501, 40}, 21);
  test::ignore_targets(batch, 10, 31);
  test::ignore_targets(batch, 532, 572);
  return batch;
}

TEST(Accumulation, MicroBatchesGiveTheGradientOfTheWhole) {
  for (const bool tied : {false, true}) {
    ModelConfig config = small_config();
    config.tie_word_embeddings = tied;
    Model model(config, small_limits());
    model.initialize(4);
    const Batch whole = uneven_batch(config);
    ASSERT_EQ(whole.valid_targets, 510);
    std::vector<Batch> parts;
    for (int64_t b = 0; b < 3; ++b) parts.push_back(test::sequence_of(whole, b));
    ASSERT_EQ(parts[0].valid_targets, 10);
    ASSERT_EQ(parts[1].valid_targets, 500);
    ASSERT_EQ(parts[2].valid_targets, 0);
    const auto want = accumulate(model, {whole}), got = accumulate(model, parts);
    const double error = test::worst_parameter_error(model, got.gradients, want.gradients);
    RecordProperty(tied ? "tied_error" : "error", fmt::format("{:.2e}", error));
    EXPECT_LE(error, 1e-5);
    EXPECT_NEAR(got.lm_loss, want.lm_loss, 1e-6);
    EXPECT_NEAR(got.aux_loss, want.aux_loss, 1e-7);
    EXPECT_NEAR(got.z_loss, want.z_loss, 1e-6);
  }
}

// Counting ahead and counting in forward are the same for one micro-batch.
TEST(Accumulation, CountingAheadEqualsCountingInForward) {
  const ModelConfig config = small_config();
  Model model(config, small_limits());
  model.initialize(4);
  const Batch batch = uneven_batch(config);
  const auto want = accumulate(model, {batch});
  const auto got = accumulate(model, {batch}, false);
  EXPECT_EQ(got.gradients, want.gradients);
  EXPECT_EQ(got.aux_loss, want.aux_loss);
  EXPECT_EQ(got.z_loss, want.z_loss);
}

TEST(Accumulation, ABatchWithoutTargetsAddsNoLossAndNoNan) {
  ModelConfig config = small_config();
  config.router_aux_loss_coef = 0;
  config.router_z_loss_coef = 0;
  Model model(config, small_limits());
  model.initialize(4);
  Batch batch = random_batch(config, {40, 20}, 22);
  test::ignore_targets(batch, 0, 60);
  ASSERT_EQ(batch.target_weight, 0.0);
  const auto result = accumulate(model, {batch});
  EXPECT_EQ(result.lm_loss, 0.0);
  EXPECT_TRUE(std::isfinite(result.aux_loss));
  EXPECT_EQ(result.gradients, std::vector<float>(result.gradients.size(), 0.0f));
  const LossSums sums = model.sums().loss;
  EXPECT_EQ(sums.targets, 0);
  EXPECT_EQ(sums.nll, 0.0);
}

// Loss weights scale a target's part of loss and gradient; a weight of 0 is an ignored target.
TEST(Accumulation, LossWeightsWeigh) {
  ModelConfig config = small_config();
  config.router_aux_loss_coef = 0;
  config.router_z_loss_coef = 0;
  Model model(config, small_limits());
  model.initialize(4);
  const Batch batch = random_batch(config, {40}, 23);
  Batch weighted = batch, zeroed = batch, ignored = batch;
  for (auto& weight : weighted.loss_weights) weight *= 0.25f;
  weighted.target_weight *= 0.25;
  const auto want = accumulate(model, {batch}), got = accumulate(model, {weighted});
  EXPECT_LE(test::norm_error(got.gradients, want.gradients), 1e-6);
  EXPECT_NEAR(got.lm_loss, want.lm_loss, 1e-6);
  test::ignore_targets(ignored, 5, 20);
  std::fill(zeroed.loss_weights.begin() + 5, zeroed.loss_weights.begin() + 20, 0.0f);
  zeroed.target_weight = ignored.target_weight;
  EXPECT_EQ(accumulate(model, {zeroed}).gradients, accumulate(model, {ignored}).gradients);
}

}  // namespace
}  // namespace biomoe
