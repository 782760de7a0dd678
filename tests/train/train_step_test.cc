#include "biomoe/train/train_step.h"

#include <gmock/gmock.h>

#include <cmath>

#include "tests/train/trainer_test_util.h"

namespace biomoe {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct StepFixture {
  StepFixture() : config(test::tiny_run(folder)), dataset(open_dataset(config.dataset)) {
    config.model.vocab_size = dataset.vocabulary.size();
    model = std::make_unique<Model>(config.model, model_limits(config, true));
    model->initialize(1);
    optimizer = std::make_unique<Optimizer>(model->parameters(), config.adamw);
    Loader loader(dataset.train, dataset.vocabulary, train_loader_options(config.dataset));
    for (Batch& batch : batches) loader.next(batch);
  }
  StepResult step() {
    return train_step(*model, *optimizer, batches,
                      {.step = 12, .lr = 1e-3, .max_grad_norm = 1.0, .poison_activations = true});
  }
  // Weights and both moments as bytes: NaN compares equal to itself.
  std::string state() const {
    std::string bytes;
    for (const TensorView& view : {model->weights_A(), optimizer->exp_avg_A(), optimizer->exp_avg_sq_A()}) {
      bytes.append(reinterpret_cast<const char*>(view.data), view.bytes());
    }
    return bytes;
  }

  const test::TempFolder folder;
  RunConfig config;
  Dataset dataset;
  std::unique_ptr<Model> model;
  std::unique_ptr<Optimizer> optimizer;
  std::vector<Batch> batches{2};
};

TEST(TrainStep, AStepUpdatesEveryParameter) {
  StepFixture f;
  const std::string before = f.state();
  const StepResult result = f.step();
  EXPECT_NE(f.state(), before);
  EXPECT_EQ(f.optimizer->steps(), 1);
  EXPECT_GT(result.loss, 0.0);
  EXPECT_GT(result.grad_norm, 0.0);
  EXPECT_EQ(result.tokens, f.batches[0].num_tokens() + f.batches[1].num_tokens());
}

TEST(TrainStep, ANonFiniteWeightStopsTheStepAndIsPlaced) {
  const struct {
    const char* weight;
    const char* place;
  } rows[] = {{"model.layers.0.self_attn.o_proj.weight", "layer 0 attention"},
              {"model.layers.1.mlp.gate.weight", "layer 1 router"},
              {"model.layers.1.mlp.experts.down_proj", "layer 1 experts"},
              {"model.norm.weight", "final norm"},
              {"lm_head.weight", "the head"}};
  for (const auto& row : rows) {
    StepFixture f;
    const TensorView weight = f.model->weight(f.model->parameters().find(row.weight));
    std::fill_n(weight.f32(), weight.num_elements(), std::nanf(""));
    const std::string before = f.state();
    EXPECT_THAT(test::message_of(ErrorKind::kFailure, [&] { f.step(); }),
                AllOf(HasSubstr("step 12: the loss is not finite"), HasSubstr(row.place),
                      HasSubstr("No update was made")));
    EXPECT_TRUE(f.state() == before) << row.weight;
    EXPECT_EQ(f.optimizer->steps(), 0);
  }
}

// Outputs of the last layer's experts are 0 times about 1e37, and the gradient of what multiplies those is
// the only one that leaves the range.
TEST(TrainStep, ANonFiniteGradientStopsTheStepAndIsNamed) {
  StepFixture f;
  const auto scale = [&](const char* name, float by) {
    const TensorView weight = f.model->weight(f.model->parameters().find(name));
    for (int64_t i = 0; i < weight.num_elements(); ++i) weight.f32()[i] *= by;
  };
  scale("lm_head.weight", 1e6f);
  scale("model.layers.1.mlp.experts.gate_up_proj", 1e18f);
  scale("model.layers.1.mlp.experts.down_proj", 0.0f);
  const std::string before = f.state();
  EXPECT_EQ(
      test::message_of(ErrorKind::kFailure, [&] { f.step(); }),
      "step 12: the gradient of model.layers.1.mlp.experts.down_proj is not finite. No update was made");
  EXPECT_TRUE(f.state() == before);
  EXPECT_EQ(f.optimizer->steps(), 0);
}

TEST(TrainStep, BatchesWithoutATargetGiveALossOfZeroAndFiniteWeights) {
  StepFixture f;
  for (Batch& batch : f.batches) {
    std::fill(batch.targets.begin(), batch.targets.end(), kIgnoreTarget);
    std::fill(batch.loss_weights.begin(), batch.loss_weights.end(), 0.0f);
    batch.valid_targets = 0;
    batch.target_weight = 0;
  }
  const StepResult result = f.step();
  EXPECT_EQ(result.lm_loss, 0.0);
  EXPECT_EQ(result.nats_per_target, 0.0);
  EXPECT_EQ(result.targets, 0);
  EXPECT_TRUE(std::isfinite(result.grad_norm));
  for (const ParamSpec& spec : f.model->parameters().specs()) {
    const float* values = f.model->weight(spec).f32();
    for (int64_t i = 0; i < spec.num_elements(); ++i) ASSERT_TRUE(std::isfinite(values[i])) << spec.name;
  }
}

}  // namespace
}  // namespace biomoe
