// Runs the built program as a child process, in a folder of its own.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/test_folder.h"

namespace biomoe::test {

struct Outcome {
  int status = -1;  // exit status; -1 when a signal ended the process
  int signal = 0;
  std::string out, err;
  uint64_t peak_bytes = 0;  // ru_maxrss of the process
};

struct Command {
  std::vector<std::string> arguments = {};
  std::string program = BIOMOE_PROGRAM;       // absolute
  std::vector<std::string> environment = {};  // NAME=value, beside what is there
  std::string folder;                         // where it runs; "" for the test's own
  uint64_t max_file_bytes = 0;                // RLIMIT_FSIZE, 0 for none
  std::string out_path, err_path;             // where stdout and stderr go; "" to be kept
  std::vector<int> closed = {};               // descriptors that it starts without
};

// A child that still runs; killed when this goes away first.
class Child {
 public:
  explicit Child(const Command& command);
  ~Child();
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  void kill_now() const;  // SIGKILL
  int pid() const { return pid_; }
  Outcome wait();

 private:
  int pid_ = -1;
  TempFolder output_;
  std::string out_path_, err_path_;
};

// key=value arguments with others in the place of those that have their keys: a key may be given once.
std::vector<std::string> with_overrides(std::vector<std::string> arguments,
                                        const std::vector<std::string>& overrides);

// A temporary folder with a synthetic genome and the smallest useful model.
class CliTest : public ::testing::Test {
 protected:
  CliTest();
  ~CliTest() override;

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::string write(const std::string& name, const std::string& text) const;
  // A FASTA of `bases` bases in records of 1000, written as NAME; the same text every time.
  std::string write_fasta(const std::string& name, int64_t bases) const;

  Command command(std::vector<std::string> arguments) const;
  Outcome run(std::vector<std::string> arguments) const;
  // `train` of a tiny model on genome.fa into the folder `run`, with further overrides.
  std::vector<std::string> train_arguments(const std::string& run,
                                           std::vector<std::string> overrides = {}) const;
  Outcome train(const std::string& run, std::vector<std::string> overrides = {}) const;

  // The lines of metrics.jsonl of a run that tell of steps, without those of validations.
  std::vector<nlohmann::json> step_metrics(const std::string& run_folder) const;

  TempFolder folder_;
};

// Every file below `folder` with its size, to see that nothing has changed.
std::vector<std::string> listing(const std::filesystem::path& folder);

// A refusal: the status, nothing on stdout, and on stderr one line "biomoe: ..." that says all `parts`.
void expect_error(const Outcome& outcome, int status, const std::vector<std::string>& parts);

}  // namespace biomoe::test
