// A run that the GPU's memory cannot hold.
#include <regex>

#include "biomoe/ops/device.h"
#include "tests/cli/cli_test_util.h"
#include "tests/cuda/gpu_test.h"

namespace biomoe::test {
namespace {

using CudaRefusalTest = CliTest;

// Of activations it needs more than any GPU has, of the host's memory little.
TEST_F(CudaRefusalTest, ARunThatDoesNotFitIsRefusedBeforeItsFirstStep) {
  BIOMOE_REQUIRE_GPU();
  write_fasta("genome.fa", 100000);
  const std::vector<std::string> sizes{
      "device=cuda",
      "config_kwargs.hidden_size=1024",
      "config_kwargs.intermediate_size=2048",
      "config_kwargs.num_hidden_layers=8",
      "config_kwargs.num_attention_heads=16",
  };
  std::vector<std::string> overrides = sizes;
  overrides.push_back("dataset.token_micro_batch_size=1048576");
  const Outcome outcome = train("large", overrides);
  expect_error(outcome, 2,
               {"bytes of GPU memory", "are there", "(weights ", "gradients ", "optimiser moments ",
                "activations ", "scratch and tables ", "driver and kernels ",
                "most are activations: choose dataset.token_micro_batch_size below 1048576"});
  EXPECT_FALSE(std::filesystem::exists(path("large/metrics.jsonl"))) << "a step was made";
  EXPECT_LT(outcome.peak_bytes, uint64_t{16} << 30) << "of the host's memory";

  // The bytes by category are those of the whole, which the GPU has not.
  std::smatch match;
  const std::regex pattern("needs (\\d+) bytes of GPU memory and (\\d+) are there \\(([^)]*)\\)");
  ASSERT_TRUE(std::regex_search(outcome.err, match, pattern)) << outcome.err;
  const uint64_t total = std::stoull(match[1]), there = std::stoull(match[2]);
  const std::string rows = match[3];
  uint64_t sum = 0;
  const std::regex row(" (\\d+)(,|$)");
  for (std::sregex_iterator at(rows.begin(), rows.end(), row), end; at != end; ++at) {
    sum += std::stoull((*at)[1]);
  }
  EXPECT_EQ(sum, total) << outcome.err;
  EXPECT_GT(total, there);
  EXPECT_LE(there, device_info(Device::kCuda).memory_bytes);

  // What the line says to set lets the same run go.
  overrides = sizes;
  overrides.insert(overrides.end(), {"dataset.token_micro_batch_size=1024", "num_train_steps=1"});
  const Outcome smaller = train("small", overrides);
  EXPECT_EQ(smaller.status, 0) << smaller.err;
}

}  // namespace
}  // namespace biomoe::test
