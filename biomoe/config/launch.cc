#include "biomoe/config/launch.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>

#include "biomoe/core/error.h"

namespace biomoe {
namespace {

std::optional<std::string> from_environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? std::optional<std::string>(value) : std::nullopt;
}

constexpr int64_t kMostRanks = 65536;

// Nothing for what is no number from 0 on.
std::optional<int64_t> count_in(const std::string& text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const bool whole = error == std::errc() && end == text.data() + text.size() && number >= 0;
  return whole ? std::optional(number) : std::nullopt;
}

}  // namespace

Launch read_launch(const std::function<std::optional<std::string>(const char*)>& variable) {
  const auto text = [&](const char* name) { return variable ? variable(name) : from_environment(name); };
  const auto count = [&](const char* name) -> int64_t {
    return count_in(text(name).value_or("")).value_or(0);
  };
  const auto number = [&](const char* name) {
    const std::string value = text(name).value_or("");
    const auto found = count_in(value);
    if (!found || *found > kMostRanks)
      throw user_error(
          "{}='{}' is no number up to {}; set it as torchrun does, or unset WORLD_SIZE for a run of "
          "one rank",
          name, value, kMostRanks);
    return *found;
  };
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}) {
    if (const int64_t processes = count(name); processes > 0)
      return {.launcher = Launcher::kMpi, .processes = processes};
  }
  const int64_t tasks = count("SLURM_STEP_NUM_TASKS");
  if (text("PMIX_RANK")) return {.launcher = Launcher::kMpi, .processes = std::max<int64_t>(1, tasks)};
  if (tasks > 1) return {.launcher = Launcher::kSrun, .processes = tasks};
  if (!text("WORLD_SIZE") || !text("RANK")) return {};
  const int64_t world = number("WORLD_SIZE"), rank = number("RANK");
  if (world <= 1) return {};
  Launch launch{.launcher = Launcher::kTorchrun,
                .processes = world,
                .rank = rank,
                .host = text("MASTER_ADDR").value_or(""),
                .port = count("MASTER_PORT")};
  if (launch.port > 0 && text("TORCHELASTIC_USE_AGENT_STORE").value_or("") == "True") ++launch.port;
  return launch;
}

}  // namespace biomoe
