// JSON from outside: parsed with bounds, so that a hostile file costs neither memory nor stack, and text from
// files made fit for one line of an error message.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace biomoe {

struct JsonLimits {
  uint64_t max_bytes = uint64_t{64} << 20;
  int max_depth = 64;
  int64_t max_values = 4'000'000;
};

// `origin` names the text in errors. user_error (one line) for a syntax error, a duplicate key, text that is
// not UTF-8, or a text beyond the limits.
nlohmann::json parse_json(std::string_view text, std::string_view origin, const JsonLimits& limits = {});

// As parse_json, of a file; user_error also when it is missing or unreadable.
nlohmann::json read_json(const std::filesystem::path& path, const JsonLimits& limits = {});

// 'text' for an error message: control characters, quotes and bytes outside ASCII escaped, shortened to about
// 120 bytes.
std::string quote(std::string_view text);

}  // namespace biomoe
