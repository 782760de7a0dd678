// The estimates of GPU steps against steps that were measured (bench/results/h200_step.json,
// h200x2_step.json).
#include "biomoe/train/step_time.h"

#include <gtest/gtest.h>

namespace biomoe {
namespace {

// Mixtral-8x7B's layers, 4096 tokens a GPU.
RunConfig mixtral(int64_t layers, int64_t ep_size, OptimizerStates states) {
  RunConfig config;
  config.model.vocab_size = 32000;
  config.model.hidden_size = 4096;
  config.model.intermediate_size = 14336;
  config.model.num_hidden_layers = layers;
  config.model.num_attention_heads = 32;
  config.model.num_key_value_heads = 8;
  config.model.num_local_experts = 8;
  config.model.num_experts_per_tok = 2;
  config.dataset.max_seq_length = 4096;
  config.dataset.token_micro_batch_size = 4096;
  config.optimizer_states = states;
  config.parallelism.ep_size = ep_size;
  return config;
}

TEST(StepTime, OfMeasuredStepsIsWithin15Percent) {
  const struct {
    int64_t layers, ep_size;
    OptimizerStates states;
    double seconds;
  } measured[] = {{4, 1, OptimizerStates::kBf16, 0.0917},
                  {4, 1, OptimizerStates::kFp32, 0.1105},
                  {8, 2, OptimizerStates::kBf16, 0.1708},
                  {8, 2, OptimizerStates::kFp32, 0.1879}};
  for (const auto& row : measured) {
    const StepTime time = estimate_gpu_step_time(mixtral(row.layers, row.ep_size, row.states), 1);
    EXPECT_NEAR(time.seconds(), row.seconds, 0.15 * row.seconds);
  }
}

TEST(StepTime, CommunicationGrowsWithCopiesAndLeavesTheHost) {
  const RunConfig config = mixtral(8, 8, OptimizerStates::kBf16);
  EXPECT_EQ(communication_seconds(mixtral(8, 1, OptimizerStates::kBf16), {.dp = 1, .ep = 1}), 0.0);
  const double one_host = communication_seconds(config, {.dp = 1, .ep = 8});
  const double two_hosts = communication_seconds(config, {.dp = 2, .ep = 8});
  EXPECT_GT(one_host, 0.0);
  EXPECT_GT(two_hosts, 2 * one_host);  // gradients and weights go from host to host
}

}  // namespace
}  // namespace biomoe
