// Runs that are killed, run into a full disk, or meet another run.
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <fstream>
#include <thread>

#include "biomoe/core/file.h"
#include "tests/cli/cli_test_util.h"

namespace biomoe::test {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using ::testing::HasSubstr;

class Interruption : public CliTest {
 protected:
  bool wait_for(const std::string& name) const {
    for (int i = 0; i < 600; ++i) {
      if (fs::exists(path(name))) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    return false;
  }
};

TEST_F(Interruption, AKilledRunContinuesToTheSameEnd) {
  const std::vector<std::string> settings{"num_train_steps=60", "checkpoint.save_every_n_steps=5"};
  ASSERT_EQ(train("whole", settings).status, 0);
  int killed = 0;
  for (int delay = 0; delay < 4; ++delay) {
    Child child(command(train_arguments("killed", settings)));
    ASSERT_TRUE(wait_for("killed/checkpoints/latest"));
    std::this_thread::sleep_for(std::chrono::milliseconds(7 * delay));
    child.kill_now();
    killed += child.wait().signal == SIGKILL;
  }
  EXPECT_GE(killed, 1);
  const Outcome outcome = train("killed", settings);
  ASSERT_EQ(outcome.status, 0) << outcome.err;
  const auto whole = step_metrics("whole"), resumed = step_metrics("killed");
  ASSERT_EQ(resumed.size(), whole.size());
  for (size_t i = 0; i < whole.size(); ++i) EXPECT_EQ(resumed[i]["loss"], whole[i]["loss"]) << i;
  EXPECT_EQ(read_file(path("killed/checkpoints/step_60/model.safetensors")),
            read_file(path("whole/checkpoints/step_60/model.safetensors")));
}

TEST_F(Interruption, TwoRunsDoNotShareAFolder) {
  const std::vector<std::string> settings{"num_train_steps=1000000"};
  Child first(command(train_arguments("run", settings)));
  ASSERT_TRUE(wait_for("run/metrics.jsonl"));
  expect_error(train("run", settings), 2, {"another run", "run_dir"});
  first.kill_now();
  EXPECT_EQ(first.wait().signal, SIGKILL);
  EXPECT_EQ(train("run", {"num_train_steps=2"}).status, 0);  // a dead run holds nothing
}

TEST_F(Interruption, AFullDiskIsOneLineAndLeavesNoHalfCheckpoint) {
  Command limited = command(train_arguments("run", {"checkpoint.async_save=false"}));
  limited.max_file_bytes = 16384;
  const Outcome outcome = Child(limited).wait();
  EXPECT_EQ(outcome.status, 1) << outcome.err;
  EXPECT_THAT(outcome.err, HasSubstr("was not saved"));
  EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
  EXPECT_TRUE(listing(path("run/checkpoints")).empty());
  EXPECT_EQ(train("run").status, 0);

  limited.arguments = {"checkpoint", "export", path("run"), path("hf")};
  EXPECT_EQ(Child(limited).wait().status, 1);
  EXPECT_FALSE(fs::exists(path("hf")));
  for (const auto& entry : fs::directory_iterator(folder_.path())) {
    EXPECT_THAT(entry.path().filename().string(), ::testing::Not(HasSubstr("partial")));
  }
}

TEST_F(Interruption, AFailedBackgroundSaveEndsTheRun) {
  Command limited = command(train_arguments("run", {"num_train_steps=6", "checkpoint.save_every_n_steps=2"}));
  limited.max_file_bytes = 16384;
  const Outcome outcome = Child(limited).wait();
  EXPECT_EQ(outcome.status, 1);
  EXPECT_THAT(outcome.err, HasSubstr("was not saved"));
  EXPECT_TRUE(listing(path("run/checkpoints")).empty());
}

}  // namespace
}  // namespace biomoe::test
