// One scalar of a configuration -> a value, and back to YAML.
#pragma once

#include <cstdint>
#include <string>

#include "biomoe/config/node.h"

namespace biomoe {

// A value of a configuration with the key it belongs to, for messages.
struct ConfigValue {
  const ConfigNode& node;
  const std::string& key;
};

// Throws user_error "origin: key: what".
[[noreturn]] void refuse_value(const ConfigValue& value, const std::string& what);

// true or false, in lower case, upper case or capitalised; yes/no/on/off are refused as ambiguous.
bool read_bool(const ConfigValue& value);

// Decimal digits with a sign and single underscores between digits: 2_000. No fraction, exponent or leading
// 0.
int64_t read_integer(const ConfigValue& value);

// A finite decimal number, with a fraction and an exponent or without: 3, 1e-3, 2_000.5.
double read_number(const ConfigValue& value);

// Any scalar but null, as written. Interpolations (${...}) are refused: they would silently be text.
std::string read_text(const ConfigValue& value);

// `text` as a YAML scalar that is read back as this text: plain where that is safe, else in double quotes.
std::string yaml_text(const std::string& text);

// Shortest decimal that reads back as the same double.
std::string yaml_number(double value);

}  // namespace biomoe
