#include "biomoe/config/load.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>

#include "biomoe/core/file.h"
#include "tests/test_folder.h"
#include "tests/unit/config/sample_config.h"

namespace biomoe {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

class LoadConfig : public ::testing::Test {
 protected:
  LoadConfig() {
    source_.search_path = {folder_ / "configs", folder_ / "share"};
    for (const auto& path : source_.search_path) fs::create_directories(path);
  }

  void put(const std::string& name, const std::string& text) { replace_file(folder_ / name, text); }
  ResolvedConfig<SampleConfig> load(const std::string& name, std::vector<std::string> overrides = {}) {
    source_.name = name;
    source_.overrides = std::move(overrides);
    return resolve<SampleConfig>(load_config(source_));
  }
  std::string message(const std::string& name) {
    return user_message([&] { load(name); });
  }

  const test::TempFolder folder_;
  ConfigSource source_;
};

TEST_F(LoadConfig, TheFirstFolderThatHasTheNameWins) {
  put("share/a.yaml", "steps: 1\n");
  EXPECT_EQ(load("a").value.steps, 1);
  put("configs/a.yaml", "steps: 2\n");
  EXPECT_EQ(load("a").value.steps, 2);
  EXPECT_EQ(load("a.yaml").value.steps, 2);
}

TEST_F(LoadConfig, AnExplicitFileNeedsNoSearchPath) {
  put("mine.yaml", "steps: 3\n");
  ConfigSource source;
  source.file = folder_ / "mine.yaml";
  EXPECT_EQ(resolve<SampleConfig>(load_config(source)).value.steps, 3);
  source.name = "a";
  EXPECT_THAT(user_message([&] { load_config(source); }), HasSubstr("both given"));
}

TEST_F(LoadConfig, AMissingNameListsWhatThereIs) {
  put("configs/L0_sanity.yaml", "");
  put("share/ecoli_tiny.yaml", "");
  EXPECT_THAT(message("ecoli_tinny"), AllOf(HasSubstr("did you mean ecoli_tiny?"), HasSubstr("configs")));
  EXPECT_THAT(message("zzzzzzzzzzzzz"), HasSubstr("there are: L0_sanity, ecoli_tiny"));
  EXPECT_THAT(message("../configs/L0_sanity"), HasSubstr("not the name of a configuration"));
  EXPECT_THAT(message("/etc/passwd"), HasSubstr("not the name of a configuration"));
}

TEST_F(LoadConfig, DefaultsAreLaidDownInOrderAndTheFileLast) {
  put("configs/base.yaml", "steps: 1\nlr: 0.5\ndataset: {max_seq_length: 7, colour: green}\n");
  put("configs/other.yaml", "lr: 0.25\n");
  put("configs/run.yaml", "defaults: [base, other]\nsteps: 2\ndataset: {max_seq_length: 8}\n");
  const SampleConfig config = load("run").value;
  EXPECT_EQ(config.steps, 2);
  EXPECT_EQ(config.lr, 0.25);
  EXPECT_EQ(config.dataset.max_seq_length, 8);
  EXPECT_EQ(config.dataset.colour, Colour::kGreen) << "maps merge key by key";
}

TEST_F(LoadConfig, SelfSaysWhereTheFileStands) {
  put("configs/base.yaml", "steps: 1\n");
  put("configs/first.yaml", "defaults: [_self_, base]\nsteps: 2\n");
  put("configs/last.yaml", "defaults:\n  - base\n  - _self_\nsteps: 2\n");
  EXPECT_EQ(load("first").value.steps, 1);
  EXPECT_EQ(load("last").value.steps, 2);
}

TEST_F(LoadConfig, AnIncludeIsLookedForBesideTheFileFirst) {
  put("configs/base.yaml", "steps: 1\n");
  put("share/base.yaml", "steps: 9\n");
  put("share/run.yaml", "defaults: [base]\n");
  EXPECT_EQ(load("run").value.steps, 9);
}

TEST_F(LoadConfig, CyclesAndBrokenDefaultsAreErrors) {
  put("configs/a.yaml", "defaults: [b]\n");
  put("configs/b.yaml", "defaults: [a]\n");
  put("configs/self.yaml", "defaults: self\n");
  EXPECT_THAT(message("a"), HasSubstr("includes itself"));
  EXPECT_THAT(message("self"), HasSubstr("includes itself"));
  put("configs/m.yaml", "defaults: {a: b}\n");
  put("configs/g.yaml", "steps: 1\ndefaults:\n  - optimizer: adam\n");
  put("configs/t.yaml", "defaults: [_self_, _self_]\n");
  put("configs/n.yaml", "defaults: [nowhere_to_be_found]\n");
  put("configs/d.yaml", "defaults: [../x]\n");
  EXPECT_THAT(message("m"), HasSubstr("a list of configuration names is expected"));
  EXPECT_THAT(message("g"), AllOf(HasSubstr("g.yaml:3: defaults"), HasSubstr("no groups")));
  EXPECT_THAT(message("t"), HasSubstr("_self_ is given twice"));
  EXPECT_THAT(message("n"), AllOf(HasSubstr("n.yaml:1: defaults"), HasSubstr("no configuration named")));
  EXPECT_THAT(message("d"), HasSubstr("not the name of a configuration"));
}

TEST_F(LoadConfig, AChainThatDoublesIsStopped) {
  put("configs/c0.yaml", "steps: 1\n");
  for (int i = 1; i < 40; ++i) {
    const std::string last = fmt::format("c{}", i - 1);
    put(fmt::format("configs/c{}.yaml", i), fmt::format("defaults: [{0}, {0}]\n", last));
  }
  EXPECT_THAT(message("c39"), HasSubstr("more than 64 files"));
  EXPECT_EQ(load("c3").value.steps, 1) << "naming a base twice is no cycle";
}

TEST_F(LoadConfig, EveryValueKnowsWhereItCameFrom) {
  put("configs/base.yaml", "steps: 1\ndataset:\n  max_seq_length: 7\n  inner:\n    depth: 3\n");
  put("configs/run.yaml", "defaults: [base]\n\nlr: 0.1\n");
  const auto config = load("run", {"dataset.inner.depth=4"});
  const std::string configs = (folder_ / "configs").string();
  EXPECT_EQ(origin_of(config, "steps").str(), configs + "/base.yaml:1");
  EXPECT_EQ(origin_of(config, "dataset.max_seq_length").str(), configs + "/base.yaml:3");
  EXPECT_EQ(origin_of(config, "lr").str(), configs + "/run.yaml:3");
  EXPECT_EQ(origin_of(config, "dataset.inner.depth").str(), "command line");
  EXPECT_EQ(origin_of(config, "name").str(), "default");
  EXPECT_THROW(origin_of(config, "nothing"), Error);
}

TEST_F(LoadConfig, AHoleInABaseIsFilledByWhatComesAfter) {
  put("configs/base.yaml", "steps: ???\n");
  put("configs/run.yaml", "defaults: [base]\n");
  EXPECT_THAT(message("run"), AllOf(HasSubstr("base.yaml:1: steps: has to be given")));
  EXPECT_EQ(load("run", {"steps=4"}).value.steps, 4);
}

}  // namespace
}  // namespace biomoe
