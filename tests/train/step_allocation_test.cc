// A warm step of training on the CPU allocates nothing: not only the model's part, but the runner's and the
// optimiser's too.
#include "tests/allocation_count.h"

#include <gtest/gtest.h>

#include "biomoe/train/train_step.h"
#include "tests/unit/model/model_test_util.h"

namespace biomoe::test {
namespace {

struct Case {
  const char* name;
  ExpertFfnMode mode = ExpertFfnMode::kFusedGroupedMlp;
  int64_t micro_batches = 1;
  double max_grad_norm = 1.0;
};

void PrintTo(const Case& c, std::ostream* to) {
  *to << c.name;
}

class StepAllocationTest : public testing::TestWithParam<Case> {};

// The batches of each step have lengths and routings of their own; the first step makes the threads.
TEST_P(StepAllocationTest, AWarmStepAllocatesNothing) {
  const Case& c = GetParam();
  ModelLimits limits = small_limits();
  limits.expert_ffn_mode = c.mode;
  limits.micro_batches = c.micro_batches;
  limits.num_threads = 3;
  Model model(small_config(), limits);
  model.initialize(3);
  Optimizer optimizer(model.parameters(), AdamwConfig{});
  StepRunner runner(model, optimizer, false);
  constexpr int64_t kWarm = 2, kSteps = 6;
  std::vector<Batch> batches;
  for (int64_t i = 0; i < kSteps * c.micro_batches; ++i) {
    batches.push_back(random_batch(small_config(), {200 + 10 * i, 100, 17}, static_cast<uint64_t>(i)));
  }
  const auto steps = [&](int64_t first, int64_t last) {
    for (int64_t step = first; step <= last; ++step) {
      const std::span<const Batch> all = batches;
      const auto count = static_cast<size_t>(c.micro_batches);
      runner.submit(all.subspan(static_cast<size_t>(step - 1) * count, count),
                    {.step = step, .lr = 1e-3, .max_grad_norm = c.max_grad_norm});
      runner.finish_sync();
    }
  };
  steps(1, kWarm);
  AllocationTrace::start();
  const int64_t before = allocations.load();
  steps(kWarm + 1, kSteps);
  AllocationTrace::stop();
  EXPECT_EQ(allocations.load() - before, 0);
  const std::vector<std::string> own = AllocationTrace::of_program();
  for (size_t i = 0; i < std::min<size_t>(own.size(), 5); ++i) ADD_FAILURE() << "from" << own[i];
}

INSTANTIATE_TEST_SUITE_P(
    Runs, StepAllocationTest,
    testing::Values(Case{"loop", ExpertFfnMode::kLoop}, Case{"grouped", ExpertFfnMode::kGroupedLinear},
                    Case{"fused"}, Case{"fused, two micro-batches", ExpertFfnMode::kFusedGroupedMlp, 2},
                    Case{"fused, not clipped", ExpertFfnMode::kFusedGroupedMlp, 1, 0.0}));

}  // namespace
}  // namespace biomoe::test
