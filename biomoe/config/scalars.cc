#include "biomoe/config/scalars.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>
#include <string_view>

#include "biomoe/core/error.h"

namespace biomoe {
namespace {

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

std::string lower(std::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return out;
}

// Words that YAML 1.1, YAML 1.2 or this reader take for something other than text.
constexpr std::array<std::string_view, 12> kReservedWords{"true", "false", "yes", "no",  "on",   "off",
                                                          "y",    "n",     "nan", "inf", "null", "none"};

bool is_reserved_word(std::string_view text) {
  const std::string word = lower(text);
  return std::find(kReservedWords.begin(), kReservedWords.end(), word) != kReservedWords.end();
}

// The text of a plain (unquoted) scalar; refuses the rest, naming what was expected.
const std::string& plain_scalar(const ConfigValue& value, std::string_view expected) {
  switch (value.node.kind) {
    case ConfigNode::Kind::kNull:
      refuse_value(value, fmt::format("{} is expected, not null; give a value or remove the key", expected));
    case ConfigNode::Kind::kList:
      refuse_value(value, fmt::format("{} is expected, not a list", expected));
    case ConfigNode::Kind::kMap:
      refuse_value(value, fmt::format("{} is expected, not a section with keys of its own", expected));
    case ConfigNode::Kind::kScalar:
      break;
  }
  if (value.node.text.empty())
    refuse_value(value, fmt::format("{} is expected, and nothing is given; give a value", expected));
  if (value.node.quoted) {
    refuse_value(value,
                 fmt::format("{} is expected, not text in quotes ({}); remove the quotes or correct it",
                             expected, shown(value.node.text)));
  }
  return value.node.text;
}

// Removes single underscores between digits and a leading '+'; no value when one stands elsewhere.
std::optional<std::string> without_underscores(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '_') {
      out += text[i];
    } else if (i == 0 || i + 1 == text.size() || !is_digit(text[i - 1]) || !is_digit(text[i + 1])) {
      return std::nullopt;
    }
  }
  if (out.size() > 1 && out[0] == '+' && (is_digit(out[1]) || out[1] == '.')) out.erase(0, 1);
  return out;
}

// Decimal digits with a fraction and an exponent, either or both absent, read to the end of the text.
std::optional<double> parse_decimal(const std::string& text, std::errc* status) {
  double number = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, number);
  *status = error;
  const bool decimal = text.find_first_not_of("0123456789.eE+-") == std::string::npos;
  if (!decimal || stop != end || error == std::errc::invalid_argument) return std::nullopt;
  return number;
}

}  // namespace

void refuse_value(const ConfigValue& value, const std::string& what) {
  throw user_error("{}: {}: {}", value.node.origin.str(), value.key, what);
}

bool read_bool(const ConfigValue& value) {
  const std::string& text = plain_scalar(value, "true or false");
  for (const std::string_view yes : {"true", "True", "TRUE"}) {
    if (text == yes) return true;
  }
  for (const std::string_view no : {"false", "False", "FALSE"}) {
    if (text == no) return false;
  }
  refuse_value(value, fmt::format("true or false is expected, not {}; write one of the two", shown(text)));
}

int64_t read_integer(const ConfigValue& value) {
  const std::string& text = plain_scalar(value, "an integer");
  const auto digits = without_underscores(text);
  int64_t number = 0;
  if (digits) {
    const char* end = digits->data() + digits->size();
    const auto [stop, error] = std::from_chars(digits->data(), end, number);
    if (stop == end && error == std::errc::result_out_of_range) {
      refuse_value(value,
                   fmt::format("{} does not fit 64 bits; write a number from {} to {}", shown(text),
                               std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max()));
    }
    const size_t first = (*digits)[0] == '-' ? 1 : 0;
    const bool leading_zero = digits->size() > first + 1 && (*digits)[first] == '0';
    if (stop == end && error == std::errc() && leading_zero) {
      refuse_value(value, fmt::format("{} starts with 0, which some readers take for octal; write {}",
                                      shown(text), number));
    }
    if (stop == end && error == std::errc()) return number;
    std::errc status{};
    const auto decimal = parse_decimal(*digits, &status);
    const bool read = decimal && status == std::errc();
    if (read && std::abs(*decimal) < 0x1p53 && std::floor(*decimal) == *decimal) {
      refuse_value(value, fmt::format("an integer is expected, not {}; write {}", shown(text),
                                      static_cast<int64_t>(*decimal)));
    }
  }
  refuse_value(value,
               fmt::format("an integer is expected, not {}; write digits only, such as 2000", shown(text)));
}

double read_number(const ConfigValue& value) {
  const std::string& text = plain_scalar(value, "a number");
  const std::string word = lower(
      text.substr(text.find_first_not_of("+-.") == std::string::npos ? 0 : text.find_first_not_of("+-.")));
  if (word == "nan" || word == "inf" || word == "infinity") {
    refuse_value(value, fmt::format("{} is not a finite number; write one", shown(text)));
  }
  if (const auto digits = without_underscores(text)) {
    std::errc status{};
    const auto number = parse_decimal(*digits, &status);
    if (number && status == std::errc()) return *number;
    if (number) {
      refuse_value(value,
                   fmt::format("{} is outside the range of a double; write a smaller exponent", shown(text)));
    }
  }
  refuse_value(value, fmt::format("a number is expected, not {}; write it as 0.001 or 1e-3", shown(text)));
}

std::string read_text(const ConfigValue& value) {
  const ConfigNode& node = value.node;
  if (node.kind == ConfigNode::Kind::kNull)
    refuse_value(value, "text is expected, not null; quote it if it is text");
  if (node.kind == ConfigNode::Kind::kList) refuse_value(value, "one value is expected, not a list");
  if (node.kind == ConfigNode::Kind::kMap) {
    refuse_value(value, "text is expected, not a section with keys of its own");
  }
  if (node.text.find("${") != std::string::npos) {
    refuse_value(value,
                 fmt::format("{}: interpolations are not supported; write the value out", shown(node.text)));
  }
  return node.text;
}

std::string yaml_text(const std::string& text) {
  const auto plain_character = [](char c) {
    return is_digit(c) || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_' || c == '/' ||
           c == '.' || c == '-' || c == '+';
  };
  const auto starts_plain = [&](char c) {
    return plain_character(c) && !is_digit(c) && c != '-' && c != '+';
  };
  const bool plain = !text.empty() && starts_plain(text[0]) &&
                     std::all_of(text.begin(), text.end(), plain_character) &&
                     !(text[0] == '.' && (text.size() == 1 || is_digit(text[1]))) &&
                     !is_reserved_word(text[0] == '.' ? std::string_view(text).substr(1) : text);
  if (plain) return text;
  std::string out = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\t') {
      out += "\\t";
    } else if (byte < 0x20 || byte == 0x7f) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
  return out + '"';
}

std::string yaml_number(double value) {
  return fmt::format("{}", value);
}

}  // namespace biomoe
