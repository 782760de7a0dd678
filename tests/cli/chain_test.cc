// train -> resume -> eval -> export -> import -> generate, with the figures compared across the commands.
#include <nlohmann/json.hpp>

#include <fstream>

#include "biomoe/core/file.h"
#include "tests/cli/cli_test_util.h"

namespace biomoe::test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::AllOf;
using ::testing::HasSubstr;

class Chain : public CliTest {
 protected:
  Outcome ran(std::vector<std::string> arguments) const {
    const Outcome outcome = run(std::move(arguments));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    return outcome;
  }
  json parsed(const std::string& name) const { return json::parse(read_file(path(name))); }
  double evaluated(const std::string& checkpoint) const {
    const std::string out = path("eval.json");
    ran({"eval", "--device", "cpu", "--checkpoint", path(checkpoint), "--data", path("genome.fa"),
         "--holdout-fraction", "0.1", "--max-seq-length", "64", "--threads", "2", "--markov", "0,2", "--json",
         out});
    const json report = json::parse(read_file(out));
    EXPECT_EQ(report["markov"].size(), 2u);
    double nats = 0;
    int64_t bases = 0;
    for (const json& record : report["records"]) {
      nats += record["nats_per_base"].get<double>() * record["bases"].get<double>();
      bases += record["bases"].get<int64_t>();
    }
    EXPECT_EQ(bases, report["total"]["bases"].get<int64_t>());
    const auto total = report["total"]["nats_per_base"].get<double>();
    EXPECT_NEAR(nats / static_cast<double>(bases), total, 1e-12);
    return total;
  }
};

TEST_F(Chain, ARunContinuedIsTheRunInOneGo) {
  ASSERT_EQ(train("whole", {"num_train_steps=6"}).status, 0);
  ASSERT_EQ(train("parts", {"num_train_steps=6", "checkpoint.save_every_n_steps=3"}).status, 0);
  // Back to step 3, as after a crash: what came later must be made again, the same.
  fs::remove_all(path("parts/checkpoints/step_6"));
  write("parts/checkpoints/latest", "step_3\n");
  const Outcome resumed = train("parts", {"num_train_steps=6", "checkpoint.save_every_n_steps=3"});
  ASSERT_EQ(resumed.status, 0) << resumed.err;
  EXPECT_THAT(resumed.err, HasSubstr("at step 3"));
  const auto whole = step_metrics("whole"), parts = step_metrics("parts");
  ASSERT_EQ(whole.size(), 6u);
  ASSERT_EQ(parts.size(), 6u);
  for (size_t i = 0; i < 6; ++i) {
    EXPECT_EQ(parts[i]["step"], i + 1);
    for (const char* key : {"loss", "grad_norm", "tokens", "lr"})
      EXPECT_EQ(parts[i][key], whole[i][key]) << key;
  }
  EXPECT_EQ(parsed("parts/summary.json")["validation"], parsed("whole/summary.json")["validation"]);
  EXPECT_EQ(read_file(path("parts/checkpoints/step_6/model.safetensors")),
            read_file(path("whole/checkpoints/step_6/model.safetensors")));
  // A third time there is nothing to do, and nothing changes.
  const auto before = listing(path("parts/checkpoints"));
  EXPECT_EQ(train("parts", {"num_train_steps=6", "checkpoint.save_every_n_steps=3"}).status, 0);
  EXPECT_EQ(listing(path("parts/checkpoints")), before);
}

TEST_F(Chain, EvaluationIsTheTrainersValidation) {
  ASSERT_EQ(train("run").status, 0);
  const json summary = parsed("run/summary.json");
  const double nats = evaluated("run");
  EXPECT_EQ(nats, summary["validation"]["nats_per_base"].get<double>());
  EXPECT_EQ(parsed("eval.json")["total"]["bases"], summary["validation"]["bases"]);
}

TEST_F(Chain, ExportedAndImportedWeightsAreTheSameModel) {
  ASSERT_EQ(train("run").status, 0);
  const double nats = evaluated("run");
  ran({"checkpoint", "export", path("run"), path("hf")});
  // Other batch sizes than in the run: sums of fp32 products may come in another order.
  EXPECT_NEAR(evaluated("hf"), nats, 1e-6);
  ran({"checkpoint", "import", path("hf"), path("back")});
  EXPECT_NEAR(evaluated("back"), nats, 1e-6);
  ran({"checkpoint", "export", path("back"), path("hf2")});
  EXPECT_EQ(read_file(path("hf2/model.safetensors")), read_file(path("hf/model.safetensors")));
  ran({"checkpoint", "export", path("run"), path("half"), "--dtype", "bfloat16"});
  EXPECT_NEAR(evaluated("half"), nats, 1e-2);  // 8 bits of mantissa
  for (const char* folder : {"run", "hf", "back", "half"}) {
    SCOPED_TRACE(folder);
    EXPECT_EQ(json::parse(ran({"checkpoint", "verify", path(folder), "--json"}).out)["ok"], true);
    const json summary = json::parse(ran({"checkpoint", "inspect", path(folder), "--json"}).out);
    EXPECT_TRUE(summary.is_object());
    ran({"checkpoint", "inspect", path(folder)});
  }
  expect_error(run({"checkpoint", "export", path("run"), path("hf")}), 2, {"hf"});
  ran({"checkpoint", "export", path("run"), path("hf"), "--overwrite"});
  expect_error(run({"checkpoint", "import", path("hf"), path("back")}), 2, {"holds checkpoints already"});
}

TEST_F(Chain, GenerationFollowsItsSeedAndThePrompt) {
  ASSERT_EQ(train("run").status, 0);
  const std::vector<std::string> words{"generate",  "--device", "cpu",  "--checkpoint",
                                       path("run"), "--prompt", "ACGT", "--max-new-tokens",
                                       "12",        "--seed"};
  const auto generated = [&](const char* seed) {
    auto arguments = words;
    arguments.emplace_back(seed);
    return ran(arguments).out;
  };
  const std::string text = generated("1");
  EXPECT_THAT(text, ::testing::MatchesRegex("ACGT[ACGT]*\n"));
  EXPECT_EQ(generated("1"), text);
  EXPECT_NE(generated("2"), text);
}

TEST_F(Chain, ADamagedCheckpointIsToldAndRefused) {
  ASSERT_EQ(train("run").status, 0);
  const std::string file = path("run/checkpoints/step_4/model.safetensors");
  std::string bytes = read_file(file);
  bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 1);
  write_file_synced(file, bytes);
  const Outcome verified = run({"checkpoint", "verify", path("run")});
  EXPECT_EQ(verified.status, 2);
  EXPECT_THAT(verified.out + verified.err, AllOf(HasSubstr("model.safetensors"), HasSubstr("damaged")));
  write_file_synced(file, bytes.substr(0, bytes.size() / 2));
  expect_error(run({"eval", "--checkpoint", path("run/checkpoints/step_4"), "--data", path("genome.fa")}), 2,
               {});
  expect_error(run({"checkpoint", "export", path("run/checkpoints/step_4"), path("hf")}), 2, {});
  EXPECT_FALSE(fs::exists(path("hf")));
}

}  // namespace
}  // namespace biomoe::test
