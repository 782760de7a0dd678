// Whole runs on the GPU: stopped and resumed, with masters in one piece or two, and on to the CPU.
#include "tests/cuda/gpu_test.h"
#include "tests/train/trainer_test_util.h"

namespace biomoe::test {
namespace {

RunConfig gpu_run(const TempFolder& folder) {
  RunConfig config = tiny_run(folder);
  config.device = DeviceChoice::kCuda;
  config.deterministic = true;
  config.model.hidden_size = 64;
  config.model.intermediate_size = 96;
  config.model.num_attention_heads = 4;
  config.model.num_key_value_heads = 2;
  config.num_train_steps = 8;
  config.checkpoint.max_checkpoints = 0;
  config.checkpoint.save_every_n_steps = 4;
  return config;
}

// The last step's tensors of a run that goes on from step 4 as `change` says.
template <typename Change>
std::map<std::string, std::string> resumed(RunConfig config, const Change& change) {
  config.num_train_steps = 4;
  train(config);
  config.num_train_steps = 8;
  change(config);
  train(config);
  return tensor_files(config, 8);
}

TEST(CudaRun, ResumesBitForBitWithMastersInOnePieceOrTwo) {
  BIOMOE_REQUIRE_GPU();
  const TempFolder whole_folder;
  const RunConfig whole = gpu_run(whole_folder);
  train(whole);
  const auto want = tensor_files(whole, 8);
  for (const bool before : {false, true}) {
    for (const bool after : {false, true}) {
      const TempFolder folder;
      RunConfig config = gpu_run(folder);
      config.optimizer_store_param_remainders = before;
      const auto got =
          resumed(config, [&](RunConfig& next) { next.optimizer_store_param_remainders = after; });
      EXPECT_TRUE(got == want) << "remainders before: " << before << ", after: " << after;
    }
  }
}

TEST(CudaRun, GoesOnWhereAnotherDeviceLeftIt) {
  BIOMOE_REQUIRE_GPU();
  double losses[2][2];
  for (const bool from_gpu : {false, true}) {
    for (const bool to_gpu : {false, true}) {
      const TempFolder folder;
      RunConfig config = gpu_run(folder);
      config.device = from_gpu ? DeviceChoice::kCuda : DeviceChoice::kCpu;
      resumed(config,
              [&](RunConfig& next) { next.device = to_gpu ? DeviceChoice::kCuda : DeviceChoice::kCpu; });
      losses[from_gpu][to_gpu] = summary(config)["final_loss"].get<double>();
    }
  }
  for (const auto& row : losses) {
    for (const double loss : row) EXPECT_NEAR(loss, losses[0][0], 0.02 * losses[0][0]);
  }
}

}  // namespace
}  // namespace biomoe::test
