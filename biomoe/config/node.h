// ConfigNode: a configuration as a tree of text, before any type is known; every node knows where it was
// written.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace biomoe {

struct Origin {
  enum class Kind : uint8_t { kDefault, kFile, kCommandLine, kDerived };
  Kind kind = Kind::kDefault;
  std::string file{};       // kFile; kDerived: what the value follows from
  int line = 0;             // kFile only; from 1
  std::string str() const;  // "default", "configs/a.yaml:12", "command line" or "from the vocabulary dna"
  bool operator==(const Origin&) const = default;
};

struct ConfigNode {
  enum class Kind : uint8_t { kNull, kScalar, kList, kMap };
  Kind kind = Kind::kNull;
  std::string text;     // kScalar: the text without quotes, escapes resolved
  bool quoted = false;  // kScalar: was written in quotes, so it is text and not a number, a bool or null
  std::vector<ConfigNode> items;                            // kList
  std::vector<std::pair<std::string, ConfigNode>> entries;  // kMap, in the order written, keys unique
  Origin origin;

  const ConfigNode* find(std::string_view key) const;  // entry of a map; null when there is none
  ConfigNode* find(std::string_view key);
};

// Lays `over` on `base`: maps merge key by key, anything else replaces, and null leaves a map as it is (an
// emptied section sets nothing).
void merge(ConfigNode& base, ConfigNode over);

// Text of a file or of the command line as an error message shows it: in single quotes, at most 60 bytes,
// control characters escaped.
std::string shown(std::string_view text);

// "a, b, c"
std::string joined(const std::vector<std::string>& items, std::string_view separator);

// True when `text` is well-formed UTF-8 without NUL.
bool is_text(std::string_view text);

// The candidate nearest to `word` by edit distance (insert, delete, replace, swap of neighbours), or empty
// when none is near enough to be a slip of the hand.
std::string nearest(std::string_view word, const std::vector<std::string>& candidates);

}  // namespace biomoe
