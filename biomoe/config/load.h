// Finding and composing configuration files.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "biomoe/config/node.h"

namespace biomoe {

// What the command line says about the configuration. At most one of `name` and `file`; with neither, only
// the overrides are laid on the defaults.
struct ConfigSource {
  std::string name;                    // --config-name: NAME or NAME.yaml in the first folder that has it
  std::filesystem::path file;          // --config
  std::vector<std::string> overrides;  // key=value
  std::vector<std::filesystem::path> search_path;
};

// Reads the file, the files that its `defaults:` list names (`defaults: [base, _self_]`, as hydra: laid down
// in that order, the file itself last unless `_self_` stands elsewhere; looked for beside the file, then in
// the search path) and the overrides. The result no longer holds `defaults`. Throws user_error in one line.
ConfigNode load_config(const ConfigSource& source);

}  // namespace biomoe
