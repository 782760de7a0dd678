// The same global batches give the same training at every layout of ranks.
#include <gmock/gmock.h>

#include <cmath>
#include <map>
#include <mutex>

#include "biomoe/train/train_step.h"
#include "tests/ranks.h"
#include "tests/train/trainer_test_util.h"

namespace biomoe {
namespace {

using test::run_ranks;
using test::TempFolder;
using test::tiny_run;

constexpr int64_t kMicroBatches = 4;  // of a step, over all ranks

struct History {
  std::vector<StepResult> steps;
  std::map<std::string, std::vector<float>> weights;  // whole parameters
};

// Checks that what several ranks hold is the same, bit for bit, and puts the parts together.
class WeightGatherer {
 public:
  void add(const Model& model) {
    const std::lock_guard lock(mutex_);
    for (const ParamSpec& spec : model.parameters().specs()) {
      auto& whole = weights_[spec.name];
      auto& seen = seen_[spec.name];
      whole.resize(static_cast<size_t>(spec.whole_shape().num_elements()));
      seen.resize(whole.size());
      const float* values = model.weight(spec).f32();
      for (int64_t i = 0; i < spec.num_elements(); ++i) {
        const auto at = static_cast<size_t>(spec.first_element() + i);
        if (seen[at]) {
          ASSERT_EQ(std::bit_cast<uint32_t>(whole[at]), std::bit_cast<uint32_t>(values[i])) << spec.name;
        }
        whole[at] = values[i];
        seen[at] = true;
      }
    }
  }
  std::map<std::string, std::vector<float>> take() {
    for (const auto& [name, seen] : seen_)
      EXPECT_TRUE(std::all_of(seen.begin(), seen.end(), [](bool there) { return there; })) << name;
    return std::move(weights_);
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::vector<float>> weights_;
  std::map<std::string, std::vector<bool>> seen_;
};

struct Layout {
  MeshSize size;
  int64_t steps = 20;
  bool tied_routers = false;  // all experts equally likely: every token goes to experts 0 and 1
};

History train_on(const RunConfig& base, const Layout& layout) {
  History history;
  WeightGatherer gatherer;
  run_ranks(static_cast<int>(layout.size.world()), [&](std::unique_ptr<Comm> world) {
    RunConfig config = base;
    config.num_threads = 1;
    config.grad_acc_steps = kMicroBatches / layout.size.world();
    const Mesh mesh(std::move(world), layout.size);
    const Dataset dataset = open_dataset(config.dataset);
    config.model.vocab_size = dataset.vocabulary.size();
    ModelLimits limits = planned_limits(config, true, Device::kCpu);
    limits.place = mesh.place();
    limits.expert_ranks = &mesh.ep();
    Model model(config.model, limits);
    model.initialize(1);
    for (const ParamSpec& spec : model.parameters().specs()) {
      if (layout.tied_routers && spec.kind == ParamKind::kRouter)
        std::fill_n(model.weight(spec).f32(), spec.num_elements(), 0.0f);
    }
    Optimizer optimizer(model.parameters(), config.adamw, {.world = &mesh.world()});
    Loader loader(dataset.train, dataset.vocabulary,
                  train_loader_options(config.dataset, {mesh.rank(), mesh.size()}));
    std::vector<Batch> batches(static_cast<size_t>(config.grad_acc_steps));
    StepRunner runner(model, optimizer, false, &mesh);
    for (int64_t step = 0; step < layout.steps; ++step) {
      for (Batch& batch : batches) loader.next(batch);
      runner.submit(batches, {.step = step, .lr = 3e-3, .max_grad_norm = 0.5, .poison_activations = true});
      const StepResult result = runner.finish_sync();
      if (mesh.rank() == 0) history.steps.push_back(result);
    }
    runner.settle();
    gatherer.add(model);
  });
  history.weights = gatherer.take();
  return history;
}

double relative(double a, double b) {
  return std::abs(a - b) / std::max(std::abs(b), 1e-30);
}

double norm_error(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += std::pow(static_cast<double>(a[i]) - static_cast<double>(b[i]), 2);
    norm += std::pow(static_cast<double>(b[i]), 2);
  }
  return std::sqrt(difference / norm);
}

void expect_same_training(const History& a, const History& b, double tolerance) {
  ASSERT_EQ(a.steps.size(), b.steps.size());
  for (size_t i = 0; i < a.steps.size(); ++i) {
    EXPECT_LE(relative(a.steps[i].loss, b.steps[i].loss), tolerance) << "loss of step " << i;
    EXPECT_LE(relative(a.steps[i].aux_loss, b.steps[i].aux_loss), tolerance) << "aux loss of step " << i;
    EXPECT_LE(relative(a.steps[i].grad_norm, b.steps[i].grad_norm), tolerance) << "norm of step " << i;
    EXPECT_EQ(a.steps[i].tokens, b.steps[i].tokens);
    EXPECT_EQ(a.steps[i].targets, b.steps[i].targets);
  }
  double worst = 0;
  for (const auto& [name, values] : a.weights) {
    const double error = norm_error(values, b.weights.at(name));
    EXPECT_LE(error, tolerance) << name;
    worst = std::max(worst, error);
  }
  ::testing::Test::RecordProperty("worst_parameter", fmt::format("{:.2e}", worst));
}

constexpr MeshSize kLayouts[] = {{2, 1}, {1, 2}, {2, 2}, {1, 4}, {4, 1}};

class ParallelStep : public ::testing::TestWithParam<MeshSize> {};

TEST_P(ParallelStep, TrainsAsOneRankDoes) {
  const TempFolder folder;
  RunConfig config = tiny_run(folder);
  config.model.router_aux_loss_coef = 0.1;
  config.model.router_z_loss_coef = 0.01;
  const History alone = train_on(config, {.size = {1, 1}});
  EXPECT_GT(alone.steps.front().grad_norm, 0.5) << "clipping should be at work";
  expect_same_training(train_on(config, {.size = GetParam()}), alone, 1e-5);
}

TEST_P(ParallelStep, WithoutAuxiliaryLossesAndWithRecomputation) {
  const TempFolder folder;
  RunConfig config = tiny_run(folder);
  config.model.router_aux_loss_coef = 0;
  config.model.tie_word_embeddings = true;
  config.recompute_layers = 2;
  expect_same_training(train_on(config, {.size = GetParam(), .steps = 5}),
                       train_on(config, {.size = {1, 1}, .steps = 5}), 1e-5);
}

TEST_P(ParallelStep, RanksWhoseExpertsReceiveNothingTakePart) {
  const TempFolder folder;
  RunConfig config = tiny_run(folder);
  config.model.router_aux_loss_coef = 0;
  const History many = train_on(config, {.size = GetParam(), .steps = 1, .tied_routers = true});
  expect_same_training(many, train_on(config, {.size = {1, 1}, .steps = 1, .tied_routers = true}), 1e-5);
}

// Scales are of all ranks' values, so codes differ only where another order of sums has moved a value over a
// border between two of them.
TEST_P(ParallelStep, InDelayedScalingScalesAreOfAllRanks) {
  const TempFolder folder;
  RunConfig config = tiny_run(folder);
  config.fp8_config.enabled = true;
  config.fp8_config.fp8_recipe = Fp8Recipe::kDelayedScaling;
  config.fp8_config.fp8_recipe_kwargs.amax_history_len = 2;
  expect_same_training(train_on(config, {.size = GetParam(), .steps = 6}),
                       train_on(config, {.size = {1, 1}, .steps = 6}), 1e-5);
}

TEST_P(ParallelStep, CopiesAreTheSameBitsAfterFiftySteps) {
  const TempFolder folder;
  const RunConfig config = tiny_run(folder);
  train_on(config, {.size = GetParam(), .steps = 50});  // the gatherer compares
}

INSTANTIATE_TEST_SUITE_P(Layouts, ParallelStep, ::testing::ValuesIn(kLayouts), [](const auto& layout) {
  return fmt::format("dp{}ep{}", layout.param.dp, layout.param.ep);
});

}  // namespace
}  // namespace biomoe
