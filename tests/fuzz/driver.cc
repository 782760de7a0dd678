// Runs a fuzz target without libFuzzer: NAME_fuzz [FOLDER|FILE]...
//
// Every file given is run as it is, then mutations of them. Mutation i depends on i and the files alone, so a
// failure repeats. BIOMOE_FUZZ_RUNS sets the number of mutations (0: only the files); unset, there are 20,000
// or as many as 3 seconds allow. An input that crashes or hangs the target is written to NAME_fuzz-crash in
// the current folder; give that file as the argument to run it alone.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "biomoe/core/error.h"
#include "biomoe/core/file.h"
#include "biomoe/core/rng.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
// Present when a sanitizer is linked in: called before it ends the program.
extern "C" void __sanitizer_set_death_callback(void (*callback)()) __attribute__((weak));

namespace biomoe {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMaxInputBytes = 1 << 16;
constexpr uint64_t kDefaultRuns = 20'000;
constexpr double kDefaultSeconds = 3.0;
constexpr unsigned kSecondsAnInput = 20;  // under the sanitizers on a busy machine; normal is microseconds

// What a signal handler needs to save the input at fault: it can take no argument.
struct Current {
  const uint8_t* data = nullptr;
  size_t size = 0;
  char crash_path[256] = "fuzz-crash";
};
Current current;

void save_current() {
  const int file = open(current.crash_path, O_WRONLY | O_CREAT | O_TRUNC, 0644);
  size_t done = 0;
  while (file >= 0 && done < current.size) {
    const ssize_t put = write(file, current.data + done, current.size - done);
    if (put <= 0) break;
    done += static_cast<size_t>(put);
  }
  constexpr std::string_view kSaid = "the fuzz target failed; its input was written to ";
  [[maybe_unused]] ssize_t ignored = write(STDERR_FILENO, kSaid.data(), kSaid.size());
  ignored = write(STDERR_FILENO, current.crash_path, std::char_traits<char>::length(current.crash_path));
  ignored = write(STDERR_FILENO, "\n", 1);
}

void on_signal(int signal_number) {
  save_current();
  std::signal(signal_number, SIG_DFL);
  std::raise(signal_number);
}

void run_one(const std::string& input) {
  current.data = reinterpret_cast<const uint8_t*>(input.data());
  current.size = input.size();
  alarm(kSecondsAnInput);
  LLVMFuzzerTestOneInput(current.data, current.size);
  alarm(0);
}

std::vector<std::string> read_seeds(int argc, char** argv) {
  std::vector<fs::path> paths;
  for (int i = 1; i < argc; ++i) {
    if (!fs::is_directory(argv[i])) {
      paths.emplace_back(argv[i]);
      continue;
    }
    for (const auto& entry : fs::recursive_directory_iterator(argv[i])) {
      if (entry.is_regular_file()) paths.push_back(entry.path());
    }
  }
  std::sort(paths.begin(), paths.end());
  std::vector<std::string> seeds;
  for (const fs::path& path : paths) seeds.push_back(read_file(path));
  if (seeds.empty()) throw user_error("no seed file; usage: {} FOLDER|FILE...", argv[0]);
  return seeds;
}

// Texts that readers of numbers, names and structure stumble over.
constexpr std::array<std::string_view, 24> kHardTexts{"-1",
                                                      "0",
                                                      "9223372036854775808",
                                                      "18446744073709551615",
                                                      "4294967296",
                                                      "1e999",
                                                      "1e-999",
                                                      "NaN",
                                                      "null",
                                                      "true",
                                                      "\"",
                                                      "'",
                                                      "[[[[[[[[",
                                                      "{",
                                                      "}",
                                                      "]",
                                                      "\n",
                                                      "\r\n",
                                                      "\t",
                                                      "\\u0000",
                                                      "../",
                                                      ">",
                                                      "@\n+\n",
                                                      "\xef\xbb\xbf"};

// Draws numbers for one mutation.
class Draw {
 public:
  Draw(const Rng& rng, uint64_t mutation) : rng_(rng), next_(mutation << 16) {}
  uint64_t word() { return rng_.u64(next_++); }
  size_t below(size_t bound) { return static_cast<size_t>(word() % std::max<size_t>(bound, 1)); }

 private:
  const Rng& rng_;
  uint64_t next_;
};

void mutate_once(std::string& input, const std::vector<std::string>& seeds, Draw& draw) {
  const size_t at = draw.below(input.size() + 1);
  const size_t length = std::min(input.size() - at, size_t{1} << draw.below(9));
  switch (draw.below(9)) {
    case 0:
      if (at < input.size()) input[at] = static_cast<char>(input[at] ^ (1 << draw.below(8)));
      break;
    case 1:
      if (at < input.size()) input[at] = static_cast<char>(draw.word());
      break;
    case 2:
      input.insert(at, 1, static_cast<char>(draw.word()));
      break;
    case 3:
      input.erase(at, length);
      break;
    case 4:
      input.insert(at, input.substr(at, length));
      break;
    case 5:
      input.insert(at, kHardTexts[draw.below(kHardTexts.size())]);
      break;
    case 6: {
      const std::string_view hard = kHardTexts[draw.below(kHardTexts.size())];
      input.replace(at, std::min(hard.size(), input.size() - at), hard);
      break;
    }
    case 7: {
      const std::string& other = seeds[draw.below(seeds.size())];
      input.insert(at, other.substr(draw.below(other.size() + 1), length));
      break;
    }
    default:
      // Lengths and offsets of binary headers are little-endian words.
      if (at + 8 <= input.size()) {
        const uint64_t word = draw.word() >> draw.below(64);
        for (size_t i = 0; i < 8; ++i) input[at + i] = static_cast<char>(word >> (8 * i));
      }
  }
}

std::string mutation_of(const std::vector<std::string>& seeds, const Rng& rng, uint64_t index) {
  Draw draw(rng, index);
  std::string input = seeds[draw.below(seeds.size())];
  if (input.size() > kMaxInputBytes) input.resize(kMaxInputBytes);
  for (size_t count = 1 + draw.below(6); count > 0; --count) mutate_once(input, seeds, draw);
  return input;
}

std::optional<uint64_t> runs_asked_for() {
  const char* text = std::getenv("BIOMOE_FUZZ_RUNS");
  if (!text || !*text) return std::nullopt;
  char* end = nullptr;
  const uint64_t runs = std::strtoull(text, &end, 10);
  if (*end != '\0') throw user_error("BIOMOE_FUZZ_RUNS={}: a number of runs is expected", text);
  return runs;
}

int drive(int argc, char** argv) {
  const std::vector<std::string> seeds = read_seeds(argc, argv);
  const auto asked = runs_asked_for();
  const std::string name = fs::path(argv[0]).filename().string() + "-crash";
  name.copy(current.crash_path, sizeof(current.crash_path) - 1);
  current.crash_path[std::min(name.size(), sizeof(current.crash_path) - 1)] = '\0';
  for (const int number : {SIGABRT, SIGSEGV, SIGILL, SIGTRAP, SIGFPE, SIGBUS, SIGALRM}) {
    std::signal(number, on_signal);
  }
  if (__sanitizer_set_death_callback) __sanitizer_set_death_callback(save_current);

  run_one("");
  for (const std::string& seed : seeds) run_one(seed);
  const Rng rng(20, RngStream::kTest);
  const auto start = std::chrono::steady_clock::now();
  uint64_t done = 0;
  for (; done < asked.value_or(kDefaultRuns); ++done) {
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
    if (!asked && spent.count() > kDefaultSeconds) break;
    run_one(mutation_of(seeds, rng, done));
  }
  std::printf("%zu seeds and %llu mutations\n", seeds.size(), static_cast<unsigned long long>(done));
  return 0;
}

}  // namespace
}  // namespace biomoe

int main(int argc, char** argv) {
  try {
    return biomoe::drive(argc, argv);
  } catch (const biomoe::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
