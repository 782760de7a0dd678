// YAML text -> ConfigNode, with limits that hold for files from outside.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "biomoe/config/node.h"

namespace biomoe {

inline constexpr uint64_t kMaxConfigBytes = 1 << 20;     // of a file
inline constexpr int kMaxConfigDepth = 16;               // of sections and lists inside each other
inline constexpr int64_t kMaxConfigNodes = 20'000;       // with every alias written out
inline constexpr int64_t kMaxConfigTextBytes = 4 << 20;  // with every alias written out

// One YAML document whose top is a map (an empty document is an empty map); JSON is read as the YAML it is.
// Anchors and aliases are followed within the limits above; tags other than !!str, merge keys (<<), keys
// given twice and a second document are refused. `name` is what messages and origins call the file. Throws
// user_error "name:line: what; what to do".
ConfigNode parse_yaml(std::string_view text, const std::string& name);

// parse_yaml of a file's content.
ConfigNode read_yaml_file(const std::filesystem::path& path);

}  // namespace biomoe
