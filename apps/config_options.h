// --config-name, --config and key=value: how every command that runs a configuration takes it.
#pragma once

#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <vector>

#include "biomoe/train/run_config.h"

namespace biomoe::apps {

struct ConfigOptions {
  std::string name, file;
  std::vector<std::string> overrides;
  ResolvedConfig<RunConfig> load() const;
};

std::shared_ptr<ConfigOptions> add_config_options(CLI::App& command);

// Says on standard error what of it is set in vain.
void tell_unused(const ResolvedConfig<RunConfig>& config);

}  // namespace biomoe::apps
