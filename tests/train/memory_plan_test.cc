#include "biomoe/train/memory_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "biomoe/checkpoint/async_saver.h"
#include "biomoe/model/model_layout.h"
#include "biomoe/train/model_image.h"
#include "biomoe/train/trainer.h"
#include "tests/test_folder.h"

namespace biomoe {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

uint64_t row(const RunMemory& memory, std::string_view name) {
  const auto found = std::find_if(memory.rows.begin(), memory.rows.end(),
                                  [&](const MemoryRow& candidate) { return candidate.name == name; });
  EXPECT_NE(found, memory.rows.end()) << name;
  return found == memory.rows.end() ? 0 : found->bytes;
}

class MemoryPlan : public ::testing::Test {
 protected:
  MemoryPlan() {
    std::string bases;
    for (int i = 0; i < 1 << 20; ++i) bases += "ACGT"[i * 7 % 11 % 4];
    config_.dataset.path = {folder_.write("a.fa", ">a\n" + bases + "\n")};
    config_.dataset.tokenizer_name_or_path = "dna";
    config_.dataset.max_seq_length = 64;
    config_.dataset.token_micro_batch_size = 256;
    config_.num_threads = 2;
    config_.device = DeviceChoice::kCpu;
    config_.model.hidden_size = 64;
    config_.checkpoint.save_every_n_steps = 10;
  }

  // A run on a GPU of which every product may be native.
  void train_in_8_bits(Fp8Recipe recipe) {
    config_.device = DeviceChoice::kCuda;
    config_.model.hidden_size = config_.model.intermediate_size = 128;
    config_.model.head_dim = 32;
    config_.model.num_attention_heads = 4;
    config_.model.num_key_value_heads = 2;
    config_.fp8_config.enabled = true;
    config_.fp8_config.fp8_recipe = recipe;
  }
  RunMemory planned() {
    const Dataset dataset = open_dataset(config_.dataset);
    resolve_model(config_, dataset.vocabulary);
    return plan_run_memory(config_, &dataset);
  }
  static std::string refusal(const RunMemory& memory, uint64_t held, uint64_t available) {
    try {
      require_memory(memory, held, available);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUser);
      return error.what();
    }
    return "";
  }
  test::TempFolder folder_;
  RunConfig config_;
};

TEST_F(MemoryPlan, RowsAreWhatTheOwnersReserve) {
  const RunMemory memory = planned();
  Model model(config_.model, model_limits(config_, true));
  Optimizer optimizer(model.parameters(), config_.adamw);
  EXPECT_GE(row(memory, "weights"), model.weights_A().bytes());
  EXPECT_LT(row(memory, "weights"), model.weights_A().bytes() + kArenaAlignment);
  EXPECT_EQ(row(memory, "checkpoint copy"),
            AsyncSaver::staging_bytes(ModelImage(model, &optimizer).groups()));
  EXPECT_GE(row(memory, "sequences"), uint64_t{1} << 20);
  EXPECT_LT(row(memory, "sequences"), (uint64_t{1} << 20) + 4096);
}

TEST_F(MemoryPlan, SettingsShowInTheirRows) {
  const RunMemory before = planned();
  config_.checkpoint.async_save = false;
  EXPECT_EQ(row(planned(), "checkpoint copy"), 0u);
  EXPECT_EQ(row(before, "validation"), 0u);
  config_.dataset.validation_fraction = 0.5;
  EXPECT_GT(row(planned(), "validation"), 0u);
  EXPECT_NEAR(static_cast<double>(row(planned(), "sequences")), static_cast<double>(row(before, "sequences")),
              4096);
  config_.grad_acc_steps = 3;
  EXPECT_EQ(row(planned(), "batches"), row(before, "batches") + 2 * Batch::planned_bytes(256));
  config_.recompute_layers = 2;
  EXPECT_LT(row(planned(), "activations"), row(before, "activations"));
  config_.num_threads = 8;
  EXPECT_GT(row(planned(), "program and threads"), row(before, "program and threads"));
}

TEST_F(MemoryPlan, WithoutTheDataTheRestStands) {
  const RunMemory whole = planned();
  const RunMemory rest = plan_run_memory(config_, nullptr);
  EXPECT_EQ(row(rest, "sequences"), 0u);
  EXPECT_EQ(row(rest, "activations"), row(whole, "activations"));
  EXPECT_NEAR(static_cast<double>(row(rest, "batches")), static_cast<double>(row(whole, "batches")), 16384);
}

// Where there is no GPU the plan is Hopper's, and where there is one it is for its way of running experts.
TEST_F(MemoryPlan, OfAGpuIsForTheWaysThatItsRunTakes) {
  if (target_capability(Device::kCuda) != 90) GTEST_SKIP() << "for compute capability 9.0";
  train_in_8_bits(Fp8Recipe::kFloat8BlockScaling);
  const uint64_t automatic = planned().gpu_total();
  EXPECT_EQ(planned_limits(config_, true, Device::kCuda).expert_ffn_mode, ExpertFfnMode::kFusedGroupedMlp);
  config_.expert_ffn_mode = ExpertFfnChoice::kFusedGroupedMlp;
  EXPECT_EQ(planned().gpu_total(), automatic);
  config_.expert_ffn_mode =
      ExpertFfnChoice::kGroupedLinear;  // keeps what the fused products pass on as codes
  EXPECT_GT(planned().gpu_total(), automatic);
  config_.expert_ffn_mode = ExpertFfnChoice::kAuto;
  config_.portable_kernels = true;
  EXPECT_EQ(planned_limits(config_, true, Device::kCuda).expert_ffn_mode, ExpertFfnMode::kLoop);
  EXPECT_NE(planned().gpu_total(), automatic);
}

// Codes of weights that ranks shard are of one layer at a time.
TEST_F(MemoryPlan, OfShardedWeightsHasTheCodesOfALayer) {
  if (target_capability(Device::kCuda) != 90) GTEST_SKIP() << "for compute capability 9.0";
  train_in_8_bits(Fp8Recipe::kFloat8BlockScaling);
  config_.model.num_hidden_layers = 6;
  config_.parallelism.dp_size = 4;
  const auto codes = [&](Fp8Recipe recipe, bool sharded, int64_t ep) {
    config_.fp8_config.fp8_recipe = recipe;
    config_.parallelism.shard_parameters = sharded;
    config_.parallelism.ep_size = ep;
    ModelLimits limits = planned_limits(config_, true, Device::kCuda);
    limits.place.shards = sharded;
    limits.place.size = {.dp = ep > 1 ? 1 : 4, .ep = ep};
    return static_cast<double>(Fp8State::planned_bytes(config_.model, fp8_shape(config_.model, limits)));
  };
  planned();
  const int64_t D = 128, F = 128;
  const auto experts = static_cast<double>(config_.model.num_local_experts * 3 * F * D);
  const auto dense = static_cast<double>(config_.model.qkv_width() * D + D * D);
  constexpr auto kBlock = Fp8Recipe::kFloat8BlockScaling, kMx = Fp8Recipe::kMxfp8BlockScaling;
  EXPECT_NEAR(codes(kBlock, false, 1) - codes(kBlock, true, 1), 5 * 2 * (experts + dense), 0.01 * experts);
  EXPECT_NEAR(codes(kBlock, false, 4) - codes(kBlock, true, 4), 5 * 2 * dense, 0.01 * experts);
  // In MXFP8 nothing is kept then, and there is memory for the largest operand instead.
  EXPECT_GT(codes(kMx, false, 1) - codes(kMx, true, 1), 5 * 2 * (experts + dense));
  config_.fp8_config.fp8_recipe_kwargs.keep_weights = false;
  EXPECT_EQ(codes(kMx, false, 1), codes(kMx, true, 1));
}

// On GPUs whose products of MXFP8 are native nothing is kept.
TEST_F(MemoryPlan, KeepWeightsIsNamedWhereTheyAreKept) {
  if (target_capability(Device::kCuda) != 90) GTEST_SKIP() << "for compute capability 9.0";
  const auto remedy = [&] {
    const RunMemory memory = planned();
    const auto scratch =
        std::find_if(memory.gpu_rows.begin(), memory.gpu_rows.end(),
                     [](const MemoryRow& candidate) { return candidate.name == "scratch and tables"; });
    return scratch == memory.gpu_rows.end() ? "" : scratch->remedy;
  };
  train_in_8_bits(Fp8Recipe::kMxfp8BlockScaling);
  EXPECT_THAT(remedy(), HasSubstr("keep_weights=false"));
  config_.fp8_config.fp8_recipe_kwargs.keep_weights = false;
  EXPECT_THAT(remedy(), Not(HasSubstr("keep_weights")));
  config_.fp8_config.fp8_recipe_kwargs.keep_weights = true;
  config_.fp8_config.fp8_recipe = Fp8Recipe::kFloat8BlockScaling;
  EXPECT_THAT(remedy(), Not(HasSubstr("keep_weights")));
  config_.fp8_config.fp8_recipe = Fp8Recipe::kMxfp8BlockScaling;
  config_.parallelism.dp_size = 2;
  config_.parallelism.shard_parameters = true;
  EXPECT_THAT(remedy(), Not(HasSubstr("keep_weights")));
}

TEST_F(MemoryPlan, RefusedOnlyWhenWhatIsStillMissingDoesNotFit) {
  const RunMemory memory{
      {{"weights", 100, "a smaller model"}, {"activations", 300, "fewer tokens"}, {"nothing", 0, ""}}};
  EXPECT_EQ(memory.total(), 400u);
  EXPECT_EQ(refusal(memory, 0, 400), "");
  EXPECT_EQ(refusal(memory, 150, 250), "");
  EXPECT_EQ(refusal(memory, 1000, 0), "");
  EXPECT_THAT(refusal(memory, 150, 249),
              AllOf(HasSubstr("needs 400 bytes"), HasSubstr("399 are there"),
                    HasSubstr("weights 100, activations 300)"), HasSubstr("choose fewer tokens")));
}

TEST_F(MemoryPlan, SizesBeyondCountingAreRefused) {
  ModelConfig& model = config_.model;
  model.vocab_size = 1 << 24;
  model.hidden_size = model.intermediate_size = 1 << 20;
  model.num_hidden_layers = model.num_local_experts = 4096;
  EXPECT_THROW(plan_run_memory(config_, nullptr), Error);
}

}  // namespace
}  // namespace biomoe
