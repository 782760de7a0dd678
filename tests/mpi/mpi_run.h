// What tests of several processes under mpiexec share.
#pragma once

#include <csignal>
#include <fstream>
#include <sstream>
#include <thread>

#include "biomoe/core/clock.h"
#include "tests/cli/cli_test_util.h"

namespace biomoe::test {

namespace fs = std::filesystem;

class MpiRun : public CliTest {
 protected:
  // mpiexec with what lets it run in a container of few processors, by anybody.
  Command mpiexec(std::vector<std::string> arguments) const {
    Command made = command({"--oversubscribe"});
    made.program = BIOMOE_MPIEXEC;
    made.environment = {"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
                        "OMPI_MCA_btl_vader_single_copy_mechanism=none",
                        "OMPI_MCA_rmaps_base_oversubscribe=1"};
    made.arguments.insert(made.arguments.end(), arguments.begin(), arguments.end());
    return made;
  }
  static std::vector<std::string> program(int ranks, std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), {"-np", std::to_string(ranks), BIOMOE_PROGRAM});
    return arguments;
  }
  Outcome run_ranks(int ranks, std::vector<std::string> arguments) const {
    return Child(mpiexec(program(ranks, std::move(arguments)))).wait();
  }
  // A run of `ranks` in which a step is always four micro-batches.
  std::vector<std::string> training(const std::string& run, int ranks,
                                    std::vector<std::string> overrides) const {
    overrides.insert(overrides.end(), {"num_threads=1", "grad_acc_steps=" + std::to_string(4 / ranks)});
    return train_arguments(run, std::move(overrides));
  }

  // Waits for something to appear.
  bool wait_for(const std::function<bool()>& there) const {
    for (int i = 0; i < 3000; ++i) {
      if (there()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return false;
  }
  bool wait_for_file(const std::string& name) const {
    return wait_for([&] { return fs::exists(path(name)); });
  }

  // Whether a save of the run is under way.
  bool saving(const std::string& run) const {
    for (const auto& entry : fs::directory_iterator(path(run + "/checkpoints")))
      if (entry.path().filename().string().find(".partial-") != std::string::npos) return true;
    return false;
  }

  // Stops a rank of a run that saves: within `seconds` the others end, with status 1 and the last save whole.
  Outcome stop_rank(Child& child, int process, double seconds) const {
    const double begin = now_seconds();
    kill(process, SIGSTOP);
    const Outcome outcome = child.wait();
    EXPECT_LT(now_seconds() - begin, seconds);
    EXPECT_EQ(outcome.status, 1) << outcome.err;
    EXPECT_EQ(run({"checkpoint", "verify", "run"}).status, 0);
    return outcome;
  }

  // Processes of biomoe whose parent is `parent`, in the order of their numbers.
  static std::vector<int> children(int parent) {
    std::vector<int> found;
    for (const auto& entry : fs::directory_iterator("/proc")) {
      const std::string name = entry.path().filename().string();
      if (name.find_first_not_of("0123456789") != name.npos) continue;
      std::ifstream file(entry.path() / "stat");
      std::string text;
      std::getline(file, text);
      const size_t end = text.rfind(')');
      if (end == text.npos || text.find("(biomoe)") == text.npos) continue;
      std::istringstream rest(text.substr(end + 1));
      std::string state;
      int its_parent = 0;
      rest >> state >> its_parent;
      if (its_parent == parent) found.push_back(std::stoi(name));
    }
    std::sort(found.begin(), found.end());
    return found;
  }
};

}  // namespace biomoe::test
