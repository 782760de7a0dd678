// Every command: its help, what it refuses on the command line, and the status it returns.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <nlohmann/json.hpp>

#include "biomoe/core/file.h"
#include "tests/cli/cli_test_util.h"

namespace biomoe::test {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using Words = std::vector<std::string>;

class Commands : public CliTest {};

const std::vector<Words> kCommands{{"train"},
                                   {"eval"},
                                   {"data"},
                                   {"data", "inspect"},
                                   {"checkpoint"},
                                   {"checkpoint", "import"},
                                   {"checkpoint", "export"},
                                   {"checkpoint", "inspect"},
                                   {"checkpoint", "verify"},
                                   {"generate"},
                                   {"plan"},
                                   {"config"},
                                   {"bench"},
                                   {"bench", "step"},
                                   {"bench", "moe"},
                                   {"info"},
                                   {"selftest"}};
// Those that run a configuration.
const std::vector<std::string> kConfigCommands{"train", "plan", "config"};

Words operator+(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

TEST_F(Commands, HelpIsPrintedByEach) {
  const Outcome all = run({"--help"});
  EXPECT_EQ(all.status, 0);
  for (const Words& words : kCommands) {
    SCOPED_TRACE(::testing::PrintToString(words));
    const Outcome outcome = run(words + Words{"--help"});
    EXPECT_EQ(outcome.status, 0);
    EXPECT_EQ(outcome.err, "");
    EXPECT_THAT(outcome.out, AllOf(HasSubstr("Usage: "), HasSubstr(words.back())));
    EXPECT_THAT(all.out, HasSubstr(words.front()));
  }
}

TEST_F(Commands, HelpShowsDefaults) {
  const std::string bench = run({"bench", "step", "--help"}).out;
  EXPECT_THAT(bench, AllOf(HasSubstr("--seq INT=512"), HasSubstr("--threads INT=0"),
                           HasSubstr("--cuda-graph BOOLEAN=true"), HasSubstr("--deterministic BOOLEAN=false"),
                           HasSubstr("--routing TEXT=random"), HasSubstr("--fp8-recipe TEXT ")));
  const std::string eval = run({"eval", "--help"}).out;
  EXPECT_THAT(eval, AllOf(HasSubstr("--device TEXT=auto"), HasSubstr("--holdout-fraction FLOAT=0 "),
                          HasSubstr("--stride INT ")));
  EXPECT_THAT(eval, ::testing::Not(HasSubstr("[]")));
  EXPECT_THAT(run({"generate", "--help"}).out, HasSubstr("--max-new-tokens INT=100"));
}

// Where the switch is not set at all; set to false, the keys are there to be switched on.
TEST_F(Commands, KeysWithoutEffectAreNamed) {
  const std::string line =
      "warning: fp8_config.fp8_recipe, fp8_config.fp8_recipe_kwargs.margin: without effect; set "
      "fp8_config.enabled=true\n";
  Words words = train_arguments("run", {"num_train_steps=1", "fp8_config.fp8_recipe=DelayedScaling",
                                        "fp8_config.fp8_recipe_kwargs.margin=1"});
  for (const char* command_ : {"train", "plan", "config"}) {
    words.front() = command_;
    const Outcome outcome = run(words);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr(line));
    const Outcome off = run(words + Words{"fp8_config.enabled=false"});
    EXPECT_THAT(off.err, ::testing::Not(HasSubstr("warning")));
  }
  const std::string section = "fp8_config.quantized_model_init_kwargs.";
  words = train_arguments("run", {"num_train_steps=1", "fp8_config.enabled=true",
                                  section + "preserve_high_precision_init_val=true"});
  words.front() = "config";
  EXPECT_THAT(run(words).err, HasSubstr("val: without effect; set " + section + "enabled=true\n"));
  EXPECT_THAT(run(words + Words{section + "enabled=true"}).err, ::testing::Not(HasSubstr("warning")));
}

TEST_F(Commands, ARunThatSavesNothingSaysSo) {
  const Words late{"checkpoint.save_final_model=false", "checkpoint.save_every_n_steps=5"};
  EXPECT_THAT(train("none", late + Words{"num_train_steps=3"}).err, HasSubstr("nothing will be saved"));
  EXPECT_THAT(train("some", late + Words{"num_train_steps=5"}).err,
              ::testing::Not(HasSubstr("nothing will be saved")));
}

TEST_F(Commands, ARunTellsWhereTheSizeOfItsVocabularyComesFrom) {
  const auto line_of = [&](const std::string& run_folder, const Words& overrides) {
    EXPECT_EQ(train(run_folder, overrides + Words{"num_train_steps=1"}).status, 0);
    const std::string text = read_file(path(run_folder + "/config.yaml"));
    const size_t begin = text.find("vocab_size: ");
    return text.substr(begin, text.find('\n', begin) - begin);
  };
  EXPECT_THAT(line_of("derived", {}),
              AllOf(HasSubstr("vocab_size: 16 "), HasSubstr("# from the vocabulary dna")));
  EXPECT_THAT(line_of("given", {"config_kwargs.vocab_size=32"}), HasSubstr("# command line"));
}

TEST_F(Commands, InfoTellsHowEachRecipeRuns) {
  const Outcome info = run({"info"});
  EXPECT_EQ(info.status, 0);
  EXPECT_THAT(info.out, HasSubstr("ranks      on CPUs: "));
  for (const char* recipe :
       {"MXFP8BlockScaling", "Float8BlockScaling", "Float8CurrentScaling", "DelayedScaling"}) {
    EXPECT_THAT(info.out,
                ::testing::ContainsRegex(std::string(recipe) + " +emulated +(native|emulated|unavailable)"));
  }
}

TEST_F(Commands, SelftestPassesOnTheCpu) {
  const Outcome outcome = run({"selftest", "--device", "cpu"});
  EXPECT_EQ(outcome.status, 0) << outcome.out << outcome.err;
  EXPECT_THAT(outcome.out, AllOf(HasSubstr("MXFP8BlockScaling"), HasSubstr("selftest: ok\n")));
  expect_error(run({"selftest", "--device", "gpu"}), 2, {"gpu"});
}

TEST_F(Commands, VersionAndInfoNameTheVersion) {
  std::string version = read_file(BIOMOE_SOURCE_DIR "/VERSION");
  version = version.substr(0, version.find('\n'));
  const Outcome outcome = run({"--version"});
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(outcome.out, "biomoe " + version + "\n");
  const Outcome info = run({"info"});
  EXPECT_EQ(info.status, 0);
  EXPECT_THAT(info.out, HasSubstr(version));
}

TEST_F(Commands, AnUnknownCommandGetsASuggestion) {
  expect_error(run({}), 2, {"subcommand is required"});
  expect_error(run({"tarin"}), 2, {"tarin", "did you mean train?"});
  expect_error(run({"data", "inspct", "x"}), 2, {"inspct", "did you mean inspect?"});
  expect_error(run({"checkpoint", "exprt"}), 2, {"exprt", "did you mean export?"});
  expect_error(run({"bench", "zzzzzzzzzzzz"}), 2, {"zzzzzzzzzzzz", "step, moe"});
}

TEST_F(Commands, AnUnknownOptionIsRefusedByEach) {
  for (const Words& words : kCommands) {
    SCOPED_TRACE(::testing::PrintToString(words));
    expect_error(run(words + Words{"--no-such-option"}), 2, {"biomoe " + words.front()});
  }
  expect_error(run({"eval", "--chekpoint", "x", "--data", "y", "--checkpoint", "z"}), 2,
               {"--chekpoint", "did you mean --checkpoint?"});
  expect_error(run({"data", "inspect", "--nope"}), 2, {"no option '--nope'"});
}

TEST_F(Commands, AMissingOptionIsNamed) {
  expect_error(run({"eval"}), 2, {"--checkpoint"});
  expect_error(run({"generate"}), 2, {"--checkpoint"});
  expect_error(run({"eval", "--checkpoint"}), 2, {"--checkpoint"});
  expect_error(run({"data", "inspect"}), 2, {"paths"});
  expect_error(run({"checkpoint", "export", "only-one"}), 2, {"destination"});
}

TEST_F(Commands, AnEmptyValueIsRefused) {
  for (const Words& words : {Words{"train", "--config", ""},
                             {"train", "--config-name", ""},
                             {"train", "--config=", "seed=1"},
                             {"eval", "--checkpoint", "x", "--data", path("genome.fa"), "--json", ""},
                             {"checkpoint", "import", "hf", ""},
                             {"checkpoint", "export", "run", ""}}) {
    SCOPED_TRACE(::testing::PrintToString(words));
    const auto before = listing(folder_.path());
    expect_error(run(words), 2, {words.back() == "seed=1" ? "--config=" : words[words.size() - 2]});
    EXPECT_EQ(listing(folder_.path()), before);
  }
  expect_error(run({"generate", "--checkpoint", "x", "--prompt="}), 2, {"--prompt= has no value"});
  // An empty prompt is one: the model then starts from BOS.
  expect_error(run({"generate", "--checkpoint", "x", "--prompt", ""}), 2, {"x: no such checkpoint"});
}

TEST_F(Commands, SeveralProcessesAreRefusedWhereTheyWouldAllDoTheSame) {
  for (const Words& words : {Words{"eval", "--checkpoint", "x", "--data", path("genome.fa")},
                             {"generate", "--checkpoint", "x"},
                             {"checkpoint", "import", "x", "y"},
                             {"checkpoint", "export", "x", "y"},
                             {"data", "inspect", path("genome.fa")},
                             {"bench", "moe"}}) {
    SCOPED_TRACE(::testing::PrintToString(words));
    Command made = command(words);
    made.environment = {"OMPI_COMM_WORLD_SIZE=2"};
    expect_error(Child(made).wait(), 2, {"one process", "2 were started", "without mpirun"});
  }
}

TEST_F(Commands, AFolderThatIsNotThereIsNoDamagedCheckpoint) {
  expect_error(run({"checkpoint", "verify", "nosuch"}), 2, {"nosuch: no such checkpoint"});
}

TEST_F(Commands, AFolderForTemporaryFilesIsNotNeededForAFewSequences) {
  Command made = command(train_arguments("run", {"num_train_steps=1"}));
  made.environment = {"TMPDIR=/nonexistent"};
  const Outcome outcome = Child(made).wait();
  EXPECT_EQ(outcome.status, 0) << outcome.err;
}

TEST_F(Commands, NothingScoredIsNoPerfectScore) {
  ASSERT_EQ(train("run", {"num_train_steps=1"}).status, 0);
  const std::string masked = write("n.fa", ">a\n" + std::string(40, 'N') + "\n");
  const Outcome outcome =
      run({"eval", "--checkpoint", path("run"), "--data", masked, "--json", path("eval.json")});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(outcome.out, ::testing::ContainsRegex("model +0 +- +- +-  nothing was scored\n"));
  const auto total = nlohmann::json::parse(read_file(path("eval.json")))["total"];
  for (const char* figure : {"nats_per_base", "bits_per_base", "perplexity"})
    EXPECT_TRUE(total.at(figure).is_null()) << figure;

  const Outcome training = train(
      "masked", {"num_train_steps=1", "dataset.validation_fraction=0", "dataset.validation_path=" + masked});
  EXPECT_EQ(training.status, 0) << training.err;
  EXPECT_THAT(training.out, HasSubstr("validation: 0 bases, nothing was scored"));
  const auto summary = nlohmann::json::parse(read_file(path("masked/summary.json")));
  EXPECT_TRUE(summary["validation"]["nats_per_base"].is_null());
  EXPECT_THAT(read_file(path("masked/metrics.jsonl")), HasSubstr("\"val_nats_per_base\":null"));
}

TEST_F(Commands, ARunGoesOnWhenNobodyReadsItsOutput) {
  const std::string pipe = path("pipe");
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  const int reader = open(pipe.c_str(), O_RDONLY | O_NONBLOCK);
  Command made = command(train_arguments("run"));
  made.out_path = pipe;
  Child child(made);
  close(reader);
  EXPECT_EQ(child.wait().status, 0);
  EXPECT_TRUE(std::filesystem::exists(path("run/checkpoints/step_4")));
}

TEST_F(Commands, AnOptionThatIsNoNumberIsRefused) {
  expect_error(run({"generate", "--checkpoint", "x", "--seed", "many"}), 2, {"--seed", "many"});
  expect_error(run({"generate", "--checkpoint", "x", "--device", "tpu"}), 2, {"--device", "tpu"});
  expect_error(run({"eval", "--checkpoint", "x", "--data", "y", "--device", "gpu"}), 2, {"--device", "gpu"});
  expect_error(run({"generate", "--checkpoint", "x", "--top-k", "1e99"}), 2, {"--top-k"});
  expect_error(run({"eval", "--checkpoint", "x", "--data", "y", "--holdout-fraction", "1.5"}), 2,
               {"--holdout-fraction", "1.5"});
  expect_error(run({"bench", "step", "--seq", "99999999999999999999"}), 2, {"--seq"});
}

TEST_F(Commands, AnUnknownKeyGetsASuggestion) {
  for (const std::string& name : kConfigCommands) {
    SCOPED_TRACE(name);
    expect_error(run({name, "dataset.max_seq_lenght=4"}), 2,
                 {"dataset.max_seq_lenght", "dataset.max_seq_length"});
    expect_error(run({name, "nmu_train_steps=4"}), 2, {"nmu_train_steps", "num_train_steps"});
    expect_error(run({name, "no-equals-sign"}), 2, {"no-equals-sign"});
  }
}

TEST_F(Commands, AConfigurationThatIsNotThereIsRefused) {
  const std::string locked = write("locked.yaml", "seed: 1\n");
  std::filesystem::permissions(locked, std::filesystem::perms::none);
  for (const std::string& name : kConfigCommands) {
    SCOPED_TRACE(name);
    expect_error(run({name, "--config-name", "ecoli_tinny"}), 2, {"ecoli_tinny"});
    expect_error(run({name, "--config", "no/such.yaml"}), 2, {"no/such.yaml"});
    expect_error(run({name, "--config", "."}), 2, {"."});
    if (geteuid() != 0) {
      expect_error(run({name, "--config", locked}), 2, {"locked.yaml"});
    }
  }
}

TEST_F(Commands, ABadConfigurationFileIsNamedWithItsLine) {
  const std::vector<std::pair<std::string, std::string>> cases{
      {"seed: 1\n  bad: [\n", "bad.yaml:"},
      {"seed: {\n", "bad.yaml:"},
      {"- a\n- b\n", "bad.yaml"},
      {"seed: 1\nseed: 2\n", "seed"},
      {"dataset: 3\n", "dataset"},
      {std::string("\x00\xff\xfe\x01", 4), "bad.yaml"},
      {"num_train_steps: many\n", "num_train_steps"}};
  for (const auto& [text, part] : cases) {
    SCOPED_TRACE(text);
    const std::string file = write("bad.yaml", text);
    for (const std::string& name : kConfigCommands) expect_error(run({name, "--config", file}), 2, {part});
  }
}

TEST_F(Commands, AConfigurationIsPrintedWithItsOrigins) {
  const std::string file = write("run.yaml", "seed: 5\ndataset:\n  path: a.fa\n");
  const Outcome outcome = run({"config", "--config", file, "num_train_steps=7"});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(outcome.out,
              AllOf(HasSubstr("seed: 5"), HasSubstr("num_train_steps: 7"), HasSubstr("run.yaml")));
}

TEST_F(Commands, OutputThatCannotBeWrittenIsAFailure) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "there is no /dev/full";
  // More and less than a buffer of the C library holds, and what the parser prints by itself.
  for (const Words& words : {Words{"config", "--reference"}, Words{"info"}, Words{"--help"}}) {
    SCOPED_TRACE(words.front());
    Command made = command(words);
    made.out_path = "/dev/full";
    expect_error(Child(made).wait(), 1, {"biomoe: standard output could not be written; look at the disk"});
  }
}

TEST_F(Commands, AMessageThatCannotBeWrittenIsLostAndNothingElse) {
  Command refused = command({"eval", "--checkpoint", "nope", "--data", path("genome.fa")});
  refused.closed = {STDERR_FILENO};
  EXPECT_EQ(Child(refused).wait().status, 2);
  if (std::filesystem::exists("/dev/full")) {
    refused.closed.clear();
    refused.err_path = "/dev/full";
    EXPECT_EQ(Child(refused).wait().status, 2);
  }
}

TEST_F(Commands, ClosedStreamsAreNotTakenForFiles) {
  const auto without_streams = [&](Words words) {
    SCOPED_TRACE(words.front());
    Command made = command(std::move(words));
    made.closed = {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO};
    EXPECT_EQ(Child(made).wait().status, 0);
  };
  const Words save{"num_train_steps=6", "checkpoint.save_every_n_steps=1"};
  ASSERT_EQ(train("whole", save).status, 0);
  without_streams(train_arguments("run", save));
  std::filesystem::remove_all(path("run/checkpoints/step_6"));
  write("run/checkpoints/latest", "step_5\n");
  without_streams(train_arguments("run", save));  // says that it resumes
  const std::string weights = "/checkpoints/step_6/model.safetensors";
  EXPECT_TRUE(read_file(path("run" + weights)) == read_file(path("whole" + weights)));
  without_streams(
      {"eval", "--checkpoint", path("run"), "--data", path("genome.fa"), "--json", path("eval.json")});
  EXPECT_TRUE(nlohmann::json::parse(read_file(path("eval.json"))).is_object());
  without_streams({"checkpoint", "export", path("run"), path("hf")});
  without_streams({"checkpoint", "import", path("hf"), path("back")});
  EXPECT_EQ(run({"checkpoint", "verify", path("back")}).status, 0);
}

TEST_F(Commands, ATrainingRunDoesNotNeedItsOutput) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "there is no /dev/full";
  Command made = command(train_arguments("run"));
  made.out_path = made.err_path = "/dev/full";
  EXPECT_EQ(Child(made).wait().status, 0);
  EXPECT_TRUE(std::filesystem::exists(path("run/checkpoints/step_4")));
}

TEST_F(Commands, BenchWritesItsFigures) {
  const Outcome outcome = run({"bench",         "step",
                               "--device",      "cpu",
                               "--layers",      "1",
                               "--hidden",      "16",
                               "--ffn",         "16",
                               "--num-experts", "2",
                               "--seq",         "16",
                               "--batch",       "2",
                               "--steps",       "2",
                               "--warmup",      "1",
                               "--json",        path("bench.json")});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_GT(nlohmann::json::parse(read_file(path("bench.json")))["tokens_per_s"].get<double>(), 0.0);
}

TEST_F(Commands, BenchTimesEveryOperation) {
  const Outcome outcome =
      run({"bench", "ops", "--layers", "1", "--hidden", "32", "--ffn", "32", "--num-experts", "2", "--seq",
           "16", "--batch", "1", "--steps", "1", "--warmup", "0"});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_THAT(outcome.out, HasSubstr("adamw"));
}

// Every way of running experts beside the loop over them, and the recipes of 8 bits, emulated on a CPU.
TEST_F(Commands, BenchShowsExpertModesSideBySideAndSkewsRouting) {
  const Outcome outcome =
      run({"bench",   "moe", "--device",      "cpu", "--layers",  "2",      "--hidden", "16",
           "--ffn",   "16",  "--num-experts", "4",   "--seq",     "16",     "--batch",  "2",
           "--steps", "1",   "--warmup",      "0",   "--routing", "skewed", "--json",   path("moe.json")});
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  const auto result = nlohmann::json::parse(read_file(path("moe.json")));
  const std::vector<std::pair<std::string, std::string>> want{
      {"loop", "fp32"},
      {"grouped_linear", "fp32"},
      {"fused_grouped_mlp", "fp32"},
      {"fused_grouped_mlp", "Float8BlockScaling emulated"},
      {"fused_grouped_mlp", "MXFP8BlockScaling emulated"}};
  ASSERT_EQ(result["rows"].size(), want.size()) << outcome.out;
  double best = INFINITY;
  for (size_t i = 0; i < want.size(); ++i) {
    const auto& row = result["rows"][i];
    const auto& [mode, precision] = want[i];
    EXPECT_EQ(row["expert_ffn_mode"], mode);
    EXPECT_EQ(row["precision"], precision);
    EXPECT_EQ(row["largest_expert_share"], 0.5);
    const double ms = row["step_ms"].get<double>(), loop_ms = result["rows"][0]["step_ms"].get<double>();
    EXPECT_THAT(outcome.out,
                ContainsRegex(mode + " +" + precision + " .*" + fmt::format("{:.2f}x", loop_ms / ms)));
    if (precision == "fp32") {
      best = std::min(best, ms);
      continue;
    }
    const double cost = ms / best - 1.0;
    EXPECT_NEAR(result["recipe_costs"][precision].get<double>(), cost, 1e-9);
    EXPECT_THAT(outcome.out, HasSubstr(fmt::format("{} {} {:.1f} % of a step", precision,
                                                   cost > 0 ? "costs" : "saves", 100.0 * std::abs(cost))));
    const std::string advice = "leave fp8_config.enabled=false";
    EXPECT_THAT(outcome.out, ContainsRegex(precision + (cost > 0 ? ".*" + advice : "[^\n]*tokens\n")));
  }
}

TEST_F(Commands, TheConfigurationReferenceIsCurrent) {
  const Outcome outcome = run({"config", "--reference"});
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(read_file(BIOMOE_SOURCE_DIR "/docs/configuration.md"), outcome.out)
      << "write it again: biomoe config --reference > docs/configuration.md";
}

}  // namespace
}  // namespace biomoe::test
