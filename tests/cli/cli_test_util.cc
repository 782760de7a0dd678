#include "tests/cli/cli_test_util.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <fstream>

#include "biomoe/core/file.h"
#include "biomoe/core/rng.h"

namespace biomoe::test {
namespace {

namespace fs = std::filesystem;

// Between fork and exec: only calls that a signal handler may make.
[[noreturn]] void become(const Command& command, char* const* arguments, int out, int err) {
  if (chdir(command.folder.c_str()) != 0) _exit(126);
  dup2(open("/dev/null", O_RDONLY), STDIN_FILENO);
  dup2(out, STDOUT_FILENO);
  dup2(err, STDERR_FILENO);
  if (command.max_file_bytes > 0) {
    const rlimit limit{command.max_file_bytes, command.max_file_bytes};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  for (const int stream : command.closed) close(stream);
  for (const std::string& variable : command.environment) putenv(const_cast<char*>(variable.c_str()));
  execv(command.program.c_str(), arguments);
  _exit(127);
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (std::string& text : texts) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

}  // namespace

Child::Child(const Command& command)
    : out_path_(output_.write("out", "")), err_path_(output_.write("err", "")) {
  std::vector<std::string> arguments{command.program};
  arguments.insert(arguments.end(), command.arguments.begin(), command.arguments.end());
  const auto argv = pointers(arguments);
  const std::string& out_target = command.out_path.empty() ? out_path_ : command.out_path;
  const int out = open(out_target.c_str(), O_WRONLY | O_CLOEXEC);
  const std::string& err_target = command.err_path.empty() ? err_path_ : command.err_path;
  const int err = open(err_target.c_str(), O_WRONLY | O_CLOEXEC);
  pid_ = fork();
  if (pid_ == 0) become(command, argv.data(), out, err);
  close(out);
  close(err);
}

Child::~Child() {
  if (pid_ > 0) {
    kill_now();
    wait();
  }
}

void Child::kill_now() const {
  kill(pid_, SIGKILL);
}

Outcome Child::wait() {
  Outcome outcome;
  int status = 0;
  rusage usage{};
  EXPECT_EQ(wait4(pid_, &status, 0, &usage), pid_);
  pid_ = -1;
  if (WIFEXITED(status)) outcome.status = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) outcome.signal = WTERMSIG(status);
  outcome.out = read_file(out_path_);
  outcome.err = read_file(err_path_);
  outcome.peak_bytes = static_cast<uint64_t>(usage.ru_maxrss) * 1024;
  return outcome;
}

std::vector<std::string> with_overrides(std::vector<std::string> arguments,
                                        const std::vector<std::string>& overrides) {
  for (const std::string& override_ : overrides) {
    const std::string key = override_.substr(0, override_.find('=') + 1);
    std::erase_if(arguments, [&](const std::string& given) { return given.starts_with(key); });
  }
  arguments.insert(arguments.end(), overrides.begin(), overrides.end());
  return arguments;
}

CliTest::CliTest() {
  write_fasta("genome.fa", 20000);
}

CliTest::~CliTest() {
  std::error_code ignored;
  for (const auto& entry : fs::recursive_directory_iterator(folder_.path(), ignored)) {
    if (entry.is_directory(ignored)) fs::permissions(entry.path(), fs::perms::owner_all, ignored);
  }
}

std::string CliTest::write(const std::string& name, const std::string& text) const {
  fs::create_directories((folder_ / name).parent_path());
  return folder_.write(name, text);
}

std::string CliTest::write_fasta(const std::string& name, int64_t bases) const {
  const Rng rng(7, RngStream::kTest);
  std::string drawn;
  for (uint64_t i = 0; i < 1'000'003; ++i) drawn += "ACGT"[rng.u64(i) % 4];
  std::string text;
  for (int64_t i = 0; i < bases; ++i) {
    if (i % 1000 == 0) text += ">record" + std::to_string(i / 1000) + "\n";
    text += drawn[static_cast<size_t>(i) % drawn.size()];
    if (i % 100 == 99 || i + 1 == bases) text += "\n";
  }
  return write(name, text);
}

Command CliTest::command(std::vector<std::string> arguments) const {
  Command made;
  made.arguments = std::move(arguments);
  made.folder = folder_.path().string();
  return made;
}

Outcome CliTest::run(std::vector<std::string> arguments) const {
  return Child(command(std::move(arguments))).wait();
}

std::vector<std::string> CliTest::train_arguments(const std::string& run,
                                                  std::vector<std::string> overrides) const {
  std::vector<std::string> arguments{"train",
                                     "run_dir=" + run,
                                     "num_train_steps=4",
                                     "num_threads=2",
                                     "device=cpu",
                                     "logger.frequency=1",
                                     "dataset.path=" + path("genome.fa"),
                                     "dataset.validation_fraction=0.1",
                                     "dataset.tokenizer_name_or_path=dna",
                                     "dataset.max_seq_length=64",
                                     "dataset.token_micro_batch_size=256",
                                     "config_kwargs.hidden_size=32",
                                     "config_kwargs.intermediate_size=32",
                                     "config_kwargs.num_hidden_layers=2",
                                     "config_kwargs.num_local_experts=4"};
  return with_overrides(std::move(arguments), overrides);
}

Outcome CliTest::train(const std::string& run_folder, std::vector<std::string> overrides) const {
  return run(train_arguments(run_folder, std::move(overrides)));
}

std::vector<nlohmann::json> CliTest::step_metrics(const std::string& run_folder) const {
  std::vector<nlohmann::json> lines;
  std::ifstream file(path(run_folder + "/metrics.jsonl"));
  for (std::string line; std::getline(file, line);) {
    nlohmann::json parsed = nlohmann::json::parse(line);
    if (parsed.contains("loss")) lines.push_back(std::move(parsed));
  }
  return lines;
}

std::vector<std::string> listing(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code ignored;
  for (const auto& entry : fs::recursive_directory_iterator(folder, ignored)) {
    const auto size = entry.is_regular_file() ? entry.file_size() : 0;
    names.push_back(fs::relative(entry.path(), folder).string() + " " + std::to_string(size));
  }
  std::sort(names.begin(), names.end());
  return names;
}

void expect_error(const Outcome& outcome, int status, const std::vector<std::string>& parts) {
  EXPECT_EQ(outcome.status, status) << outcome.err;
  EXPECT_EQ(outcome.signal, 0);
  EXPECT_EQ(outcome.out, "");
  EXPECT_THAT(outcome.err, ::testing::StartsWith("biomoe: "));
  EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
  EXPECT_THAT(outcome.err, ::testing::EndsWith("\n"));
  for (const std::string& part : parts) EXPECT_THAT(outcome.err, ::testing::HasSubstr(part));
}

}  // namespace biomoe::test
