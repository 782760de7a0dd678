// `plan` against the peak resident memory of the same run.
#include <nlohmann/json.hpp>

#include "biomoe/core/file.h"
#include "tests/cli/cli_test_util.h"

namespace biomoe::test {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

class Plan : public CliTest {
 protected:
  // What plan says of the run that `train` with these arguments makes.
  json planned(std::vector<std::string> arguments) const {
    arguments.front() = "plan";
    arguments.insert(arguments.end(), {"--json", path("plan.json")});
    const Outcome outcome = run(arguments);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    for (const char* row : {"weights", "activations", "total", "step time"})
      EXPECT_THAT(outcome.out, HasSubstr(row));
    return json::parse(read_file(path("plan.json")));
  }
  void expect_planned_within_five_percent(const std::vector<std::string>& arguments) const {
    const json plan = planned(arguments);
    const Outcome outcome = run(arguments);
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    const auto total = plan["total_bytes"].get<double>();
    const auto peak = static_cast<double>(outcome.peak_bytes);
    RecordProperty("planned_bytes", std::to_string(total));
    RecordProperty("peak_bytes", std::to_string(peak));
    EXPECT_NEAR(total / peak, 1.0, 0.05) << plan["bytes"].dump(1) << "\npeak " << outcome.peak_bytes;
    uint64_t sum = 0;
    for (const auto& row : plan["bytes"].items()) sum += row.value().get<uint64_t>();
    EXPECT_EQ(sum, plan["total_bytes"].get<uint64_t>());
  }
  std::vector<std::string> tiny(const std::vector<std::string>& overrides) const {
    return with_overrides(
        {"train", "--config", BIOMOE_SOURCE_DIR "/configs/ecoli_tiny.yaml", "run_dir=" + path("run"),
         "dataset.path=" + path("genome.fa"), "num_train_steps=3", "num_threads=2", "device=cpu"},
        overrides);
  }
};

TEST_F(Plan, EcoliTinyIsPlannedWithinFivePercent) {
  write_fasta("genome.fa", 4639675);
  expect_planned_within_five_percent(tiny({"validation.max_batches=1", "dataset.validation_fraction=0.01"}));
}

TEST_F(Plan, ARunWithoutTheCheckpointCopyToo) {
  write_fasta("genome.fa", 1000000);
  expect_planned_within_five_percent(
      tiny({"checkpoint.async_save=false", "grad_acc_steps=2", "dataset.num_workers=4", "recompute_layers=1",
            "dataset.validation_fraction=0"}));
}

TEST_F(Plan, ALargerModelToo) {
  write_fasta("genome.fa", 200000);
  expect_planned_within_five_percent(
      tiny({"config_kwargs.hidden_size=512", "config_kwargs.intermediate_size=512",
            "config_kwargs.num_hidden_layers=4", "dataset.token_micro_batch_size=8192", "num_train_steps=2",
            "checkpoint.save_every_n_steps=1", "dataset.validation_fraction=0"}));
}

TEST_F(Plan, AGenomeThatOutweighsTheModelToo) {
  write_fasta("genome.fa", 60000000);
  auto arguments = train_arguments("run", {"dataset.validation_fraction=0"});
  expect_planned_within_five_percent(arguments);
}

// Needs no GPU.
TEST_F(Plan, OfAGpuListsItsMemoryApart) {
  const std::vector<std::string> settings{"dataset.path=elsewhere.fa", "device=cuda",
                                          "config_kwargs.head_dim=16"};
  auto with_masters = settings;
  with_masters.push_back("optimizer_store_param_remainders=false");
  const json whole = planned(train_arguments("run", with_masters));
  EXPECT_EQ(whole["device"], "cuda");
  uint64_t sum = 0;
  for (const auto& row : whole["gpu_bytes"].items()) sum += row.value().get<uint64_t>();
  EXPECT_EQ(sum, whole["gpu_total_bytes"].get<uint64_t>());
  const json parts = planned(train_arguments("run", settings));
  const auto masters = whole["gpu_bytes"]["fp32 masters"].get<uint64_t>();
  EXPECT_GT(masters, 0u);
  EXPECT_NEAR(parts["gpu_bytes"]["remainders of masters"].get<double>(), static_cast<double>(masters) / 2,
              256);
  EXPECT_LT(parts["gpu_total_bytes"].get<uint64_t>(), whole["gpu_total_bytes"].get<uint64_t>());
}

TEST_F(Plan, RefusesWhatTheRunWouldRefuse) {
  auto arguments = train_arguments("run", {"optimizer_states=bf16"});
  const Outcome trained = run(arguments);
  arguments.front() = "plan";
  const Outcome plan = run(arguments);
  expect_error(plan, 2, {"optimizer_states=bf16", "device=cuda"});
  EXPECT_EQ(plan.err, trained.err);
  const auto refuses = [&](const std::vector<std::string>& overrides, const std::vector<std::string>& parts) {
    auto all = train_arguments("run", overrides);
    all.front() = "plan";
    expect_error(run(all), 2, parts);
  };
  refuses({"device=cuda"}, {"heads are 8 wide", "config_kwargs.head_dim"});
  const std::string wide = "config_kwargs.head_dim=16";
  refuses({"device=cuda", wide, "portable_kernels=true", "expert_ffn_mode=fused_grouped_mlp"},
          {"expert_ffn_mode=fused_grouped_mlp", "portable_kernels=true"});
  refuses({"device=cuda", wide, "fp8_config.enabled=true", "fp8_config.fp8_recipe=Float8CurrentScaling",
           "fp8_config.fp8_recipe_kwargs.power_2_scale=false"},
          {"power_2_scale=false"});
  refuses({"device=cuda", "config_kwargs.head_dim=256", "portable_kernels=true", "expert_ffn_mode=loop"},
          {"heads are 256 wide", "up to 128 with portable_kernels"});
  refuses({"sanity_check=true", "num_train_steps=1"}, {"sanity_check=true", "num_train_steps above 1"});
  refuses({"init_from=elsewhere"}, {"elsewhere"});
  ASSERT_EQ(train("other", {"num_train_steps=1"}).status, 0);
  ASSERT_EQ(run({"checkpoint", "export", path("other"), path("hf")}).status, 0);
  refuses({"init_from=" + path("hf"), "config_kwargs.intermediate_size=96"},
          {"init_from=", "intermediate_size"});
}

TEST_F(Plan, In8BitsItSaysWhichProductsAreNative) {
  auto arguments = train_arguments(
      "run", {"device=cuda", "config_kwargs.hidden_size=256", "config_kwargs.intermediate_size=192",
              "config_kwargs.num_attention_heads=4", "config_kwargs.head_dim=64", "fp8_config.enabled=true",
              "fp8_config.fp8_recipe=Float8BlockScaling", "parallelism.ep_size=2"});
  arguments.front() = "plan";
  const Outcome outcome = run(arguments);
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(outcome.out,
              HasSubstr("from attention native; gate and up emulated exactly in BF16, since down "
                        "cannot be native; down emulated exactly in BF16, since the widths 192 "
                        "and 256"));
  EXPECT_THAT(outcome.out, HasSubstr("host of all ranks"));
}

TEST_F(Plan, WithoutTheFilesItSaysWhatIsNotCounted) {
  auto arguments = train_arguments("run", {"dataset.path=elsewhere.fa"});
  const json plan = planned(arguments);
  EXPECT_EQ(plan["sequences_counted"], false);
  EXPECT_EQ(plan["bytes"]["sequences"], 0);
  EXPECT_GT(plan["step_time"]["seconds"].get<double>(), 0.0);
  arguments.front() = "plan";
  EXPECT_THAT(run(arguments).out, HasSubstr("elsewhere.fa"));
  const Outcome none = run({"plan", "device=cuda", "dataset.tokenizer_name_or_path=dna"});
  EXPECT_EQ(none.status, 0) << none.err;
  EXPECT_THAT(none.out, HasSubstr("without the sequences: dataset.path is empty"));
}

// Of Mixtral-8x7B over eight GPUs, as shipped; the counts follow from its published shape.
TEST_F(Plan, AMeshIsPlannedForOneOfItsRanks) {
  const std::string config = std::string(BIOMOE_SOURCE_DIR) + "/configs/L1_8x7B_ep.yaml";
  const auto plan_of = [&](std::vector<std::string> overrides) {
    std::vector<std::string> arguments{"plan", "--config", config, "--json", path("plan.json")};
    arguments.insert(arguments.end(), overrides.begin(), overrides.end());
    const Outcome outcome = run(arguments);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    return json::parse(read_file(path("plan.json")));
  };
  const double experts = 32.0 * 3 * 4096 * 14336, all = 46702792704.0;
  const double held = all - 7 * experts;  // of one of the eight experts
  const json plan = plan_of({});
  EXPECT_EQ(plan["parameters"], all);
  EXPECT_EQ(plan["mesh"], json({{"dp", 1}, {"ep", 8}}));
  const auto bytes = [](const json& from, const char* row) { return from["gpu_bytes"][row].get<double>(); };
  EXPECT_NEAR(bytes(plan, "weights") / (2 * held), 1, 1e-4);
  // Both moments in fp32: of the experts whole, of the rest an eighth.
  EXPECT_NEAR(bytes(plan, "optimiser moments") / (8 * (experts + (held - experts) / 8)), 1, 1e-4);
  EXPECT_EQ(plan["cards"]["80 GB"]["fits"], false);
  EXPECT_THAT(plan["cards"]["80 GB"]["text"].get<std::string>(), HasSubstr("optimizer_states=bf16"));
  EXPECT_EQ(plan["cards"]["141 GB"]["fits"], true);
  EXPECT_EQ(plan["cards"]["192 GB"]["fits"], true);
  const json two = plan_of({"parallelism.dp_size=2"});
  EXPECT_NEAR(bytes(two, "optimiser moments") / bytes(plan, "optimiser moments"), 0.5, 1e-4);
  // What a rank keeps, and room for two layers, the embedding and the head.
  const json sharded = plan_of({"parallelism.dp_size=8", "parallelism.shard_parameters=true"});
  const double kept = experts / 8 + (held - experts) / 64;
  const double rooms = 2 * (experts + held - experts - 2 * 32000 * 4096.0) / 32 + 2 * 32000 * 4096.0;
  for (const char* row : {"weights", "gradients"})
    EXPECT_NEAR(bytes(sharded, row) / (2 * (kept + rooms)), 1, 1e-4);
  const json smaller =
      plan_of({"optimizer_states=bf16", "fp8_config.quantized_model_init_kwargs.enabled=false"});
  EXPECT_EQ(smaller["cards"]["80 GB"]["fits"], true);
  expect_error(run({"plan", "--config", config, "parallelism.ep_size=3"}), 2,
               {"num_local_experts=8", "ep_size=3"});
}

TEST_F(Plan, ARunThatCannotFitIsRefusedWithItsBytes) {
  const auto arguments = train_arguments("run", {"dataset.token_micro_batch_size=2000000000"});
  const json plan = planned(arguments);
  const Outcome outcome = run(arguments);
  // What the program itself holds differs by some pages from one start to the next.
  const uint64_t total = plan["total_bytes"].get<uint64_t>() >> 24;
  const auto told = outcome.err.find("needs ");
  ASSERT_NE(told, std::string::npos) << outcome.err;
  EXPECT_NEAR(static_cast<double>(std::stoull(outcome.err.substr(told + 6)) >> 24),
              static_cast<double>(total), 1);
  expect_error(outcome, 2,
               {"activations " + std::to_string(plan["bytes"]["activations"].get<uint64_t>()),
                "dataset.token_micro_batch_size"});
  EXPECT_FALSE(std::filesystem::exists(path("run")));
}

TEST_F(Plan, StepsAreTimedOnlyWhereTheyFit) {
  const std::vector<std::string> sizes{"--layers", "4", "--hidden", "256", "--ffn", "512", "--seq", "512"};
  const auto bench = [&](std::vector<std::string> more) {
    std::vector<std::string> arguments{"bench",   "step", "--device", "cpu", "--threads", "2",
                                       "--steps", "1",    "--warmup", "0",   "--json",    path("bench.json")};
    arguments.insert(arguments.end(), sizes.begin(), sizes.end());
    arguments.insert(arguments.end(), more.begin(), more.end());
    return run(arguments);
  };
  const Outcome fits = bench({"--num-experts", "8"});
  ASSERT_EQ(fits.status, 0) << fits.err;
  const auto total = json::parse(read_file(path("bench.json")))["memory_planned_bytes"].get<double>();
  EXPECT_NEAR(total / static_cast<double>(fits.peak_bytes), 1.0, 0.05);
  expect_error(bench({"--num-experts", "8", "--batch", "2000000"}), 2,
               {"the run needs ", " bytes of memory and ", "most are activations", "--batch or --seq"});
  expect_error(bench({"--optimizer-states", "bf16"}), 2, {"optimizer_states=bf16 needs device=cuda"});
}

TEST_F(Plan, OperationsAreTimedOnlyWhereTheyFit) {
  // Less and more than the arrays of the copy.
  for (const char* layers : {"1", "16"}) {
    const Outcome fits =
        run({"bench", "ops", "--layers", layers, "--hidden", "256", "--ffn", "512", "--seq", "256",
             "--threads", "2", "--steps", "1", "--warmup", "0", "--json", path("bench.json")});
    ASSERT_EQ(fits.status, 0) << fits.err;
    const auto total = json::parse(read_file(path("bench.json")))["memory_planned_bytes"].get<double>();
    EXPECT_NEAR(total / static_cast<double>(fits.peak_bytes), 1.0, 0.05) << layers;
  }
  const auto refuses = [&](std::vector<std::string> arguments, const std::vector<std::string>& parts) {
    SCOPED_TRACE(::testing::PrintToString(arguments));
    arguments.insert(arguments.begin(), {"bench", "ops"});
    expect_error(run(arguments), 2, parts);
  };
  refuses({"--hidden", "200000", "--ffn", "200000"},
          {"the run needs ", " bytes of memory and ", "program and threads",
           "most are weights, gradients and moments: choose a smaller model (--layers"});
  refuses({"--batch", "4000000"}, {"most are other operands", "--batch or --seq"});
  refuses({"--seq", "100000000", "--batch", "1", "--threads", "1"}, {"the run needs ", "--seq"});
  refuses({"--hidden", "1048576", "--ffn", "1048576", "--num-experts", "4096", "--layers", "4096"},
          {"the run needs about ", "choose smaller sizes"});
}

TEST_F(Plan, SideBySideOneLineSaysWhyNothingFits) {
  const auto refuses = [&](const std::vector<std::string>& sizes, const std::vector<std::string>& parts) {
    SCOPED_TRACE(::testing::PrintToString(sizes));
    std::vector<std::string> arguments{"bench", "moe", "--device", "cpu", "--json", path("moe.json")};
    arguments.insert(arguments.end(), sizes.begin(), sizes.end());
    expect_error(run(arguments), 2, parts);
    EXPECT_FALSE(std::filesystem::exists(path("moe.json")));
  };
  refuses({"--num-experts", "2147483647"}, {"num_local_experts=2147483647 is outside"});
  refuses({"--hidden", "65536", "--ffn", "262144", "--num-experts", "64"},
          {"the run needs ", "choose a smaller model"});
}

}  // namespace
}  // namespace biomoe::test
