#include "biomoe/config/launch.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>

namespace biomoe {
namespace {

std::optional<std::string> from_environment(const char* name) {
  const char* value = std::getenv(name);
  return value ? std::optional<std::string>(value) : std::nullopt;
}

}  // namespace

Launch read_launch(const std::function<std::optional<std::string>(const char*)>& variable) {
  const auto text = [&](const char* name) { return variable ? variable(name) : from_environment(name); };
  const auto count = [&](const char* name) -> int64_t {
    const auto value = text(name);
    if (!value) return 0;
    int64_t number = 0;
    const auto [end, error] = std::from_chars(value->data(), value->data() + value->size(), number);
    return error == std::errc() && end == value->data() + value->size() ? number : 0;
  };
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}) {
    if (const int64_t processes = count(name); processes > 0)
      return {.launcher = Launcher::kMpi, .processes = processes};
  }
  const int64_t tasks = count("SLURM_STEP_NUM_TASKS");
  if (text("PMIX_RANK")) return {.launcher = Launcher::kMpi, .processes = std::max<int64_t>(1, tasks)};
  if (tasks > 1) return {.launcher = Launcher::kSrun, .processes = tasks};
  const int64_t world = count("WORLD_SIZE");
  if (world <= 1 || !text("RANK")) return {};
  Launch launch{.launcher = Launcher::kTorchrun,
                .processes = world,
                .rank = count("RANK"),
                .host = text("MASTER_ADDR").value_or(""),
                .port = count("MASTER_PORT")};
  if (launch.port > 0 && text("TORCHELASTIC_USE_AGENT_STORE").value_or("") == "True") ++launch.port;
  return launch;
}

}  // namespace biomoe
