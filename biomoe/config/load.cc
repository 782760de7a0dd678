#include "biomoe/config/load.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <set>

#include "biomoe/config/overrides.h"
#include "biomoe/config/yaml_reader.h"
#include "biomoe/core/error.h"

namespace biomoe {
namespace {

namespace fs = std::filesystem;

constexpr int kMaxIncludedFiles = 64;  // a chain that names each base twice doubles with every file

bool is_config_file(const fs::path& path) {
  return path.extension() == ".yaml" || path.extension() == ".yml";
}

std::optional<fs::path> find_in(const fs::path& folder, const std::string& name) {
  std::error_code ignored;
  for (const char* suffix : {".yaml", ".yml", ""}) {
    const fs::path path = folder / (name + suffix);
    if (is_config_file(path) && fs::is_regular_file(path, ignored)) return path;
  }
  return std::nullopt;
}

std::vector<std::string> names_in(const std::vector<fs::path>& folders) {
  std::set<std::string> names;
  for (const fs::path& folder : folders) {
    std::error_code error;
    for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
      if (is_config_file(entry->path())) names.insert(entry->path().stem().string());
    }
  }
  return {names.begin(), names.end()};
}

std::string path_list(const std::vector<fs::path>& folders) {
  std::vector<std::string> texts;
  for (const fs::path& folder : folders) texts.push_back(folder.string());
  return texts.empty() ? "(no folder)" : joined(texts, ", ");
}

class Loader {
 public:
  explicit Loader(const ConfigSource& source) : source_(source) {}

  fs::path find(const std::string& name, const std::vector<fs::path>& folders,
                const std::string& where) const {
    const fs::path path(name);
    const bool climbs = std::find(path.begin(), path.end(), fs::path("..")) != path.end();
    if (name.empty() || path.is_absolute() || climbs || !is_text(name)) {
      throw user_error("{}{}: not the name of a configuration; give a file with --config", where,
                       shown(name));
    }
    for (const fs::path& folder : folders) {
      if (auto found = find_in(folder, name)) return *found;
    }
    const auto names = names_in(folders);
    const std::string near = nearest(name, names);
    const std::string help = !near.empty()   ? fmt::format("did you mean {}?", near)
                             : names.empty() ? "there is none there; give a file with --config"
                                             : fmt::format("there are: {}", joined(names, ", "));
    throw user_error("{}no configuration named {} in {}; {}", where, shown(name), path_list(folders), help);
  }

  ConfigNode load(const fs::path& path) {
    const std::string name = path.string();
    const std::string identity = fs::weakly_canonical(path).string();
    if (std::find(open_.begin(), open_.end(), identity) != open_.end()) {
      throw user_error("{}: includes itself through 'defaults'; remove one of the includes", name);
    }
    if (++files_ > kMaxIncludedFiles) {
      throw user_error("{}: more than {} files through 'defaults'; include each base once", name,
                       kMaxIncludedFiles);
    }
    open_.push_back(identity);
    ConfigNode self = read_yaml_file(path);
    ConfigNode composed = compose(std::move(self), path);
    open_.pop_back();
    return composed;
  }

 private:
  // The `defaults` list taken out of `self`, as names; `_self_` is added at the end when it is missing.
  static std::vector<ConfigNode> take_defaults(ConfigNode& self) {
    const auto entry = std::find_if(self.entries.begin(), self.entries.end(),
                                    [](const auto& candidate) { return candidate.first == "defaults"; });
    std::vector<ConfigNode> names;
    if (entry != self.entries.end()) {
      ConfigNode list = std::move(entry->second);
      self.entries.erase(entry);
      if (list.kind == ConfigNode::Kind::kScalar) {
        names.push_back(std::move(list));
      } else if (list.kind == ConfigNode::Kind::kList) {
        names = std::move(list.items);
      } else if (list.kind == ConfigNode::Kind::kMap) {
        throw user_error("{}: defaults: a list of configuration names is expected: defaults: [base, _self_]",
                         list.origin.str());
      }
    }
    int64_t selves = 0;
    for (const ConfigNode& name : names) {
      if (name.kind != ConfigNode::Kind::kScalar) {
        throw user_error("{}: defaults: only names of configurations are supported, no groups or options",
                         name.origin.str());
      }
      if (name.text == "_self_" && ++selves > 1) {
        throw user_error("{}: defaults: _self_ is given twice; keep one", name.origin.str());
      }
    }
    if (selves == 0) {
      ConfigNode last;
      last.kind = ConfigNode::Kind::kScalar;
      last.text = "_self_";
      names.push_back(std::move(last));
    }
    return names;
  }

  ConfigNode compose(ConfigNode self, const fs::path& path) {
    ConfigNode composed;
    composed.kind = ConfigNode::Kind::kMap;
    composed.origin = self.origin;
    std::vector<fs::path> folders{path.parent_path().empty() ? fs::path(".") : path.parent_path()};
    folders.insert(folders.end(), source_.search_path.begin(), source_.search_path.end());
    for (const ConfigNode& name : take_defaults(self)) {
      if (name.text == "_self_") {
        merge(composed, std::move(self));
      } else {
        merge(composed, load(find(name.text, folders, name.origin.str() + ": defaults: ")));
      }
    }
    return composed;
  }

  const ConfigSource& source_;
  std::vector<std::string> open_;  // files being read, outermost first
  int files_ = 0;
};

}  // namespace

ConfigNode load_config(const ConfigSource& source) {
  if (!source.name.empty() && !source.file.empty()) {
    throw user_error("--config-name and --config are both given; keep one");
  }
  ConfigNode config;
  config.kind = ConfigNode::Kind::kMap;
  Loader loader(source);
  if (!source.name.empty()) {
    config = loader.load(loader.find(source.name, source.search_path, "--config-name: "));
  } else if (!source.file.empty()) {
    config = loader.load(source.file);
  }
  apply_overrides(config, source.overrides);
  return config;
}

}  // namespace biomoe
