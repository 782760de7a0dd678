// train -> resume -> eval -> export -> import -> generate, with the figures compared across the commands.
#include <nlohmann/json.hpp>

#include <fmt/format.h>

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

// Whatever name the file goes by. Nothing is said of other sequences, or where nothing was trained on.
TEST_F(Chain, EvaluationTellsOfBasesThatWereTrainedOn) {
  ASSERT_EQ(train("run", {"dataset.validation_fraction=0.1"}).status, 0);
  fs::create_symlink(path("genome.fa"), path("link.fa"));
  write("other.fa", ">r\n" + std::string(200, 'A') + "\n");
  const auto told = [&](const char* data, const char* fraction) {
    return ran({"eval", "--device", "cpu", "--checkpoint", path("run"), "--data", path(data),
                "--holdout-fraction", fraction})
               .err.find("seen in training") != std::string::npos;
  };
  EXPECT_FALSE(told("genome.fa", "0.1"));
  EXPECT_FALSE(told("genome.fa", "0.05"));
  EXPECT_TRUE(told("genome.fa", "0.2"));
  EXPECT_TRUE(told("genome.fa", "0"));
  EXPECT_TRUE(told("link.fa", "0.2"));
  EXPECT_FALSE(told("other.fa", "0"));
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
  for (const auto& entry : fs::directory_iterator(path("hf")))
    EXPECT_EQ(read_file(path("hf2") / entry.path().filename()), read_file(entry.path())) << entry.path();
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

// Without --max-seq-length, so that windows too are those of the run.
TEST_F(Chain, AnExportIsReadAsItsRunReadIt) {
  std::string lower = read_file(path("genome.fa"));
  for (size_t i = lower.size() / 2; i < lower.size(); ++i)
    if (lower[i] >= 'A' && lower[i] <= 'Z' && lower[i - 1] != '>')
      lower[i] = static_cast<char>(lower[i] | 0x20);
  write("genome.fa", lower);
  const std::vector<std::vector<std::string>> settings{
      {"dataset.soft_masked=keep"},
      {"dataset.add_bos=false", "dataset.max_seq_length=32", "dataset.stride=8"}};
  for (size_t i = 0; i < settings.size(); ++i) {
    SCOPED_TRACE(::testing::PrintToString(settings[i]));
    const std::string run_folder = fmt::format("run{}", i), hf = fmt::format("hf{}", i);
    ASSERT_EQ(train(run_folder, settings[i]).status, 0);
    ran({"checkpoint", "export", path(run_folder), path(hf)});
    ran({"checkpoint", "import", path(hf), path(hf + "/../back" + std::to_string(i))});
    std::vector<json> totals;
    for (const std::string& from : {run_folder, hf, "back" + std::to_string(i)}) {
      ran({"eval", "--device", "cpu", "--checkpoint", path(from), "--data", path("genome.fa"), "--threads",
           "2", "--json", path("eval.json")});
      totals.push_back(parsed("eval.json")["total"]);
    }
    EXPECT_EQ(totals[1], totals[0]);
    EXPECT_EQ(totals[2], totals[0]);
  }
  EXPECT_EQ(parsed("hf0/config.json")["bos_token_id"], 2);
  EXPECT_TRUE(parsed("hf1/config.json")["bos_token_id"].is_null());
  // Lower case is the tokenizer's matter where nothing else is said.
  json config = parsed("hf0/config.json");
  config.erase("biomoe_dataset");
  write("hf0/config.json", config.dump());
  EXPECT_NE(evaluated("hf0"), 0.0);
  const double kept = evaluated("hf0");
  EXPECT_NEAR(kept, evaluated("run0"), 1e-6);
  config["biomoe_dataset"] = {{"max_seq_length", -1}};
  write("hf0/config.json", config.dump());
  expect_error(run({"generate", "--checkpoint", path("hf0")}), 2, {"biomoe_dataset", "max_seq_length=-1"});
}

TEST_F(Chain, AnImportedRunTrainsOn) {
  ASSERT_EQ(train("run").status, 0);
  ran({"checkpoint", "export", path("run"), path("hf")});
  for (const auto& [name, more] : std::vector<std::pair<std::string, std::vector<std::string>>>{
           {"a", {}}, {"b", {"config_name_or_path=" + path("hf")}}}) {
    ran({"checkpoint", "import", path("hf"), path(name)});
    const Outcome outcome = train(name, more);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("at step 0"), ::testing::Not(HasSubstr("trained with"))));
    EXPECT_EQ(step_metrics(name).size(), 4u);
  }
}

TEST_F(Chain, WithoutATokenizerWeightsAreExportedAndOthersAskForOne) {
  ASSERT_EQ(train("run").status, 0);
  const double nats = evaluated("run");
  ran({"checkpoint", "export", path("run"), path("hf")});
  fs::remove(path("hf/tokenizer.json"));
  fs::remove(path("hf/tokenizer_config.json"));
  json config = parsed("hf/config.json");
  config.erase("biomoe_dataset");
  config["bos_token_id"] = 1;
  config["eos_token_id"] = {2, 3};
  write("hf/config.json", config.dump(2) + "\n");
  ran({"checkpoint", "import", path("hf"), path("back")});
  for (const char* from : {"hf", "back"}) {
    SCOPED_TRACE(from);
    const std::string out = std::string("out_") + from;
    EXPECT_THAT(ran({"checkpoint", "export", path(from), path(out)}).err, HasSubstr("--tokenizer"));
    for (const char* name : {"model.safetensors", "config.json"})
      EXPECT_EQ(read_file(path(out + "/" + name)), read_file(path(std::string("hf/") + name)));
    EXPECT_FALSE(fs::exists(path(out + "/tokenizer.json")));
    expect_error(run({"eval", "--checkpoint", path(from), "--data", path("genome.fa")}), 2, {"--tokenizer"});
    expect_error(run({"generate", "--checkpoint", path(from), "--prompt", "A"}), 2, {"--tokenizer"});
    expect_error(run({"generate", "--checkpoint", path(from), "--prompt", "A", "--tokenizer", "nucleotide"}),
                 2, {"vocab_size=16 is below the 256 entries"});
    ran({"generate", "--checkpoint", path(from), "--prompt", "A", "--tokenizer", "dna", "--device", "cpu"});
    ran({"eval", "--checkpoint", path(from), "--data", path("genome.fa"), "--holdout-fraction", "0.1",
         "--max-seq-length", "64", "--tokenizer", "dna", "--device", "cpu", "--json", path("eval.json")});
    EXPECT_NEAR(parsed("eval.json")["total"]["nats_per_base"].get<double>(), nats, 1e-6);
    ran({"checkpoint", "export", path(from), path(out), "--tokenizer", "dna", "--overwrite"});
    EXPECT_TRUE(fs::exists(path(out + "/tokenizer.json")));
    EXPECT_EQ(parsed(out + "/config.json")["bos_token_id"], 2);
  }
}

TEST_F(Chain, BasesWithoutATokenAreTold) {
  ASSERT_EQ(train("run").status, 0);
  ran({"checkpoint", "export", path("run"), path("hf")});
  json tokenizer = parsed("hf/tokenizer.json");
  json& vocab = tokenizer["model"]["vocab"];
  vocab["x"] = vocab["A"];
  vocab.erase("A");
  write("hf/tokenizer.json", tokenizer.dump());
  write("short.fa", ">r\nAACAGT\n");
  const Outcome outcome =
      ran({"eval", "--checkpoint", path("hf"), "--data", path("short.fa"), "--device", "cpu"});
  EXPECT_THAT(outcome.err, HasSubstr("3 of 6 symbols of the data have no token"));
}

TEST_F(Chain, ARunIsNotStartedOverItsDamagedCheckpoints) {
  ASSERT_EQ(train("run", {"checkpoint.save_every_n_steps=2"}).status, 0);
  for (const char* step : {"step_4", "step_2"}) {
    const std::string file = path(std::string("run/checkpoints/") + step + "/model.safetensors");
    fs::resize_file(file, fs::file_size(file) - 100);
    const Outcome verified = run({"checkpoint", "verify", path("run")});
    EXPECT_EQ(verified.status, 2);
    EXPECT_THAT(verified.out, HasSubstr(step));
  }
  fs::remove(path("run/checkpoints/latest"));
  const auto before = listing(path("run"));
  const Outcome outcome = train("run");
  EXPECT_EQ(outcome.status, 2);
  EXPECT_THAT(outcome.err, AllOf(HasSubstr("step_2 is damaged"), HasSubstr("step_4 is damaged"),
                                 HasSubstr("none of its 2 checkpoints can be used")));
  EXPECT_EQ(listing(path("run")), before);
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
