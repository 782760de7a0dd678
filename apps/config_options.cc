#include "apps/config_options.h"

#include <filesystem>

#include "biomoe/core/console.h"

namespace biomoe::apps {
namespace {

namespace fs = std::filesystem;

// The small data that comes with the configurations, "configs/data/NAME", is found wherever those are.
std::string shipped(const std::string& path, const std::vector<fs::path>& search) {
  if (!path.starts_with("configs/data/")) return path;
  std::error_code ignored;
  for (const fs::path& configs : search) {
    const fs::path found = configs / path.substr(std::string_view("configs/").size());
    if (fs::exists(found, ignored)) return found.lexically_normal().string();
  }
  return path;
}

}  // namespace

std::shared_ptr<ConfigOptions> add_config_options(CLI::App& command) {
  auto options = std::make_shared<ConfigOptions>();
  command.add_option("--config-name", options->name, "a configuration of configs/, e.g. ecoli_tiny");
  command.add_option("--config", options->file, "a configuration file");
  command.add_option("overrides", options->overrides,
                     "key=value, e.g. dataset.path=my.fa.gz num_train_steps=500");
  return options;
}

ResolvedConfig<RunConfig> ConfigOptions::load() const {
  // The checkout's configs/, then those beside the installed program.
  std::vector<fs::path> search{"configs"};
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error).parent_path();
  if (!error) {
    search.push_back(program / "../../../configs");
    search.push_back(program / "../share/biomoe/configs");
  }
  ResolvedConfig<RunConfig> config =
      load_run_config({.name = name, .file = file, .overrides = overrides, .search_path = search});
  for (std::string& path : config.value.dataset.path) path = shipped(path, search);
  return config;
}

void tell_unused(const ResolvedConfig<RunConfig>& config) {
  const std::string keys = unused_fp8_keys(config);
  if (!keys.empty()) tell(stderr, "warning: {}\n", keys);
}

}  // namespace biomoe::apps
