#include "biomoe/config/node.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace biomoe {

std::string Origin::str() const {
  switch (kind) {
    case Kind::kDefault:
      return "default";
    case Kind::kFile:
      return fmt::format("{}:{}", file, line);
    case Kind::kCommandLine:
      return "command line";
    case Kind::kDerived:
      return "from " + file;
  }
  return {};
}

const ConfigNode* ConfigNode::find(std::string_view key) const {
  for (const auto& [name, node] : entries) {
    if (name == key) return &node;
  }
  return nullptr;
}

ConfigNode* ConfigNode::find(std::string_view key) {
  return const_cast<ConfigNode*>(std::as_const(*this).find(key));
}

void merge(ConfigNode& base, ConfigNode over) {
  if (base.kind == ConfigNode::Kind::kMap && over.kind == ConfigNode::Kind::kNull) return;
  if (base.kind != ConfigNode::Kind::kMap || over.kind != ConfigNode::Kind::kMap) {
    base = std::move(over);
    return;
  }
  for (auto& [key, node] : over.entries) {
    if (ConfigNode* existing = base.find(key)) {
      merge(*existing, std::move(node));
    } else {
      base.entries.emplace_back(key, std::move(node));
    }
  }
}

std::string shown(std::string_view text) {
  constexpr size_t kMost = 60;
  std::string out = "'";
  for (char c : text.substr(0, kMost)) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\n') {
      out += "\\n";
    } else if (c == '\t') {
      out += "\\t";
    } else if (byte < 0x20 || byte == 0x7f) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
  return out + (text.size() > kMost ? "...'" : "'");
}

namespace {

// Bytes of the well-formed UTF-8 sequence that starts `text` (Unicode 15, table 3-7); 0 when there is none.
size_t utf8_sequence(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const auto lead = byte(0);
  if (lead < 0x80) return 1;
  const size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < length) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  const bool overlong = (lead == 0xe0 && byte(1) < 0xa0) || (lead == 0xf0 && byte(1) < 0x90);
  const bool surrogate = lead == 0xed && byte(1) > 0x9f;
  const bool beyond = lead == 0xf4 && byte(1) > 0x8f;
  return overlong || surrogate || beyond ? 0 : length;
}

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> before(b.size() + 1), previous(b.size() + 1), current(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) previous[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    current[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replace = previous[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      current[j] = std::min({replace, previous[j] + 1, current[j - 1] + 1});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) current[j] = std::min(current[j], before[j - 2] + 1);
    }
    std::swap(before, previous);
    std::swap(previous, current);
  }
  return previous[b.size()];
}

}  // namespace

std::string joined(const std::vector<std::string>& items, std::string_view separator) {
  std::string out;
  for (size_t i = 0; i < items.size(); ++i) {
    if (i > 0) out += separator;
    out += items[i];
  }
  return out;
}

bool is_text(std::string_view text) {
  while (!text.empty()) {
    const size_t length = utf8_sequence(text);
    if (length == 0 || text[0] == '\0') return false;
    text.remove_prefix(length);
  }
  return true;
}

std::string nearest(std::string_view word, const std::vector<std::string>& candidates) {
  constexpr size_t kLongest = 100;  // keys are short; do not spend time on pages of text
  if (word.size() > kLongest) return {};
  size_t best = std::max<size_t>(2, word.size() / 3) + 1;
  std::string name;
  for (const std::string& candidate : candidates) {
    const size_t distance = edit_distance(word, candidate);
    if (distance < best && distance < candidate.size()) {
      best = distance;
      name = candidate;
    }
  }
  return name;
}

}  // namespace biomoe
