// What a run plans to take from the GPU against what the driver reports.
#include "biomoe/train/memory_plan.h"

#include "biomoe/ops/device_peak.h"
#include "tests/cuda/gpu_test.h"
#include "tests/train/trainer_test_util.h"

namespace biomoe::test {
namespace {

// About 200 million parameters and 8,192 tokens a micro-batch: 6 GB and more.
RunConfig middle_run(const TempFolder& folder) {
  RunConfig config = tiny_run(folder);
  config.device = DeviceChoice::kCuda;
  config.model.hidden_size = 1024;
  config.model.intermediate_size = 2048;
  config.model.num_hidden_layers = 4;
  config.model.num_attention_heads = 16;
  config.model.num_key_value_heads = 4;
  config.model.num_local_experts = 8;
  config.model.initializer_range = 0.02;
  config.model.max_position_embeddings = 1024;
  config.num_train_steps = 4;
  config.grad_acc_steps = 1;
  config.num_threads = 0;
  config.poison_activations = false;
  config.dataset.path = {folder.write("long.fa", ">a\n" + random_bases(400000, 1) + "\n")};
  config.dataset.max_seq_length = 1024;
  config.dataset.token_micro_batch_size = 8192;
  config.checkpoint.save_final_model = false;
  return config;
}

TEST(CudaMemory, IsPlannedWithinThreePercentOfWhatTheDriverReports) {
  BIOMOE_REQUIRE_GPU();
  constexpr size_t kIdle = size_t{5} << 28;  // this program's context, with room
  const size_t before = device_info(Device::kCuda).used_bytes();
  if (before > kIdle) GTEST_SKIP() << "the GPU is not idle: " << before << " bytes are in use";
  enum class Kind { kPlain, kLean, kFp8 };
  for (const Kind kind : {Kind::kPlain, Kind::kLean, Kind::kFp8}) {
    const bool lean = kind == Kind::kLean;
    const TempFolder folder;
    RunConfig config = middle_run(folder);
    config.optimizer_store_param_remainders = lean;
    if (lean) {
      config.recompute_layers = 4;
      config.grad_acc_steps = 2;
    }
    config.fp8_config.enabled = kind == Kind::kFp8;
    config.fp8_config.fp8_recipe = Fp8Recipe::kFloat8BlockScaling;
    train(config);
    const nlohmann::json told = summary(config);
    const auto used = told["device_memory_used_bytes"].get<double>();
    const auto planned = told["device_memory_planned_bytes"].get<double>();
    constexpr std::array<const char*, 3> kNames{"", "lean_", "fp8_"};
    const std::string name = kNames[static_cast<size_t>(kind)];
    RecordProperty(name + "used_bytes", std::to_string(used));
    RecordProperty(name + "planned_bytes", std::to_string(planned));
    fmt::print("{:.0f} bytes planned, {:.0f} used: {:+.2f} %\n", planned, used, 100 * (planned / used - 1));
    EXPECT_GT(planned, 3e9);
    EXPECT_NEAR(planned, used, 0.03 * used);
  }
}

TEST(CudaMetrics, HaveTheShareOfAKnownPeak) {
  BIOMOE_REQUIRE_GPU();
  const TempFolder folder;
  const RunConfig config = middle_run(folder);
  train(config);
  const std::string text = read_file(std::filesystem::path(config.run_dir) / "metrics.jsonl");
  const auto line = nlohmann::json::parse(text.substr(0, text.find('\n')));
  const auto peak = peak_bf16_flops(device_info(Device::kCuda).name);
  if (!peak) {
    EXPECT_TRUE(line["mfu"].is_null());
    return;
  }
  EXPECT_NEAR(line["mfu"].get<double>(), line["tflops"].get<double>() * 1e12 / *peak, 1e-9);
  EXPECT_GT(line["mfu"].get<double>(), 0.0);
  EXPECT_LT(line["mfu"].get<double>(), 1.0);
}

}  // namespace
}  // namespace biomoe::test
