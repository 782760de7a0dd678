#include "biomoe/config/overrides.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <string_view>

#include "biomoe/config/yaml_reader.h"
#include "biomoe/core/error.h"

namespace biomoe {
namespace {

const Origin kCommandLine{Origin::Kind::kCommandLine, {}, 0};

[[noreturn]] void refuse(const std::string& argument, std::string_view what) {
  throw user_error("command line: {}: {}", shown(argument), what);
}

bool is_blank(char c) {
  return c == ' ' || c == '\t';
}

bool is_name_character(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
}

// A cursor over the text after '='.
class ValueParser {
 public:
  ValueParser(const std::string& argument, std::string_view text) : argument_(argument), text_(text) {}

  ConfigNode parse() {
    skip_blanks();
    while (text_.size() > at_ && is_blank(text_.back())) text_.remove_suffix(1);
    if (at_end()) return scalar({}, true);
    ConfigNode node;
    if (peek() == '[') {
      node = list();
    } else if (peek() == '\'' || peek() == '"') {
      node = scalar(quoted(), true);
    } else if (peek() == '{') {
      refuse(argument_, "a map is not a value; give each key by itself: section.key=value");
    } else {
      return bare(text_.substr(at_));
    }
    skip_blanks();
    if (!at_end()) refuse(argument_, "text after the closing quote or bracket; put all of the value inside");
    return node;
  }

 private:
  bool at_end() const { return at_ == text_.size(); }
  char peek() const { return text_[at_]; }
  void skip_blanks() {
    while (!at_end() && is_blank(peek())) ++at_;
  }

  static ConfigNode scalar(std::string text, bool is_quoted) {
    ConfigNode node;
    node.kind = ConfigNode::Kind::kScalar;
    node.text = std::move(text);
    node.quoted = is_quoted;
    node.origin = kCommandLine;
    return node;
  }

  static ConfigNode bare(std::string_view text) {
    ConfigNode node = scalar(std::string(text), false);
    if (text == "null" || text == "~") {
      node.kind = ConfigNode::Kind::kNull;
      node.text.clear();
    }
    return node;
  }

  std::string quoted() {
    const char quote = text_[at_++];
    std::string out;
    while (!at_end()) {
      const char c = text_[at_++];
      if (c == quote && quote == '\'' && !at_end() && peek() == '\'') {
        out += text_[at_++];
      } else if (c == quote) {
        return out;
      } else if (c == '\\' && quote == '"') {
        out += escape();
      } else {
        out += c;
      }
    }
    refuse(argument_, "the closing quote is missing");
  }

  char escape() {
    if (!at_end()) {
      switch (text_[at_++]) {
        case 'n':
          return '\n';
        case 't':
          return '\t';
        case '"':
          return '"';
        case '\\':
          return '\\';
        default:
          break;
      }
    }
    refuse(argument_, "an unknown escape; in double quotes write \\\\ for a backslash");
  }

  ConfigNode list() {
    ConfigNode node;
    node.kind = ConfigNode::Kind::kList;
    node.origin = kCommandLine;
    ++at_;
    skip_blanks();
    if (!at_end() && peek() == ']') {
      ++at_;
      return node;
    }
    while (true) {
      node.items.push_back(list_item());
      skip_blanks();
      if (at_end()) refuse(argument_, "the closing ']' is missing");
      const char c = text_[at_++];
      if (c == ']') return node;
      if (c != ',') refuse(argument_, "a comma or ']' is expected after a quoted item");
    }
  }

  ConfigNode list_item() {
    skip_blanks();
    if (!at_end() && (peek() == '\'' || peek() == '"')) return scalar(quoted(), true);
    const size_t end = std::min(text_.find_first_of(",]", at_), text_.size());
    std::string_view item = text_.substr(at_, end - at_);
    while (!item.empty() && is_blank(item.back())) item.remove_suffix(1);
    if (item.empty()) refuse(argument_, "an empty item in the list; write '' for empty text");
    if (item.find_first_of("[{") == 0)
      refuse(argument_, "a list inside a list; quote the item if it is text");
    at_ = end;
    return bare(item);
  }

  const std::string& argument_;
  std::string_view text_;
  size_t at_ = 0;
};

std::vector<std::string> split_key(const std::string& argument, std::string_view key) {
  std::vector<std::string> parts;
  while (true) {
    const size_t dot = key.find('.');
    const std::string_view part = key.substr(0, dot);
    if (part.empty() || !std::all_of(part.begin(), part.end(), is_name_character)) {
      const bool hydra = !key.empty() && (key[0] == '+' || key[0] == '~');
      refuse(argument, hydra && parts.empty()
                           ? "write the key without '+' or '~'; every key already has a value"
                           : "not a key; write section.key=value");
    }
    parts.emplace_back(part);
    if (dot == std::string_view::npos) return parts;
    key.remove_prefix(dot + 1);
  }
}

}  // namespace

ConfigNode parse_override(const std::string& argument) {
  if (!is_text(argument)) refuse(argument, "not UTF-8 text");
  const size_t equals = argument.find('=');
  if (equals == std::string::npos) refuse(argument, "'=' is missing; write section.key=value");
  const std::string_view text = argument;
  const auto parts = split_key(argument, text.substr(0, equals));
  if (static_cast<int>(parts.size()) > kMaxConfigDepth)
    refuse(argument, "too many dots; no key is that deep");
  ConfigNode node = ValueParser(argument, text.substr(equals + 1)).parse();
  for (auto part = parts.rbegin(); part != parts.rend(); ++part) {
    ConfigNode parent;
    parent.kind = ConfigNode::Kind::kMap;
    parent.origin = kCommandLine;
    parent.entries.emplace_back(*part, std::move(node));
    node = std::move(parent);
  }
  return node;
}

void apply_overrides(ConfigNode& config, const std::vector<std::string>& arguments) {
  std::map<std::string, std::string> given;  // by key
  for (const std::string& argument : arguments) {
    ConfigNode node = parse_override(argument);
    const auto [first, fresh] = given.emplace(argument.substr(0, argument.find('=')), argument);
    if (!fresh)
      refuse(argument, fmt::format("the key is given twice (first {}); keep one", shown(first->second)));
    merge(config, std::move(node));
  }
}

}  // namespace biomoe
