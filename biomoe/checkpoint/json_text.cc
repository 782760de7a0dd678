#include "biomoe/checkpoint/json_text.h"

#include <functional>
#include <string>
#include <unordered_set>
#include <vector>

#include "biomoe/core/descriptor.h"
#include "biomoe/core/error.h"
#include "biomoe/core/file.h"

namespace biomoe {
namespace {

using nlohmann::json;

// Enforces the limits and the uniqueness of keys while the parser runs; called once for every event.
class Guard {
 public:
  Guard(std::string_view origin, const JsonLimits& limits) : origin_(origin), limits_(limits) {}

  bool operator()(int depth, json::parse_event_t event, const json& parsed) {
    if (event == json::parse_event_t::object_start || event == json::parse_event_t::array_start) {
      if (depth >= limits_.max_depth) {
        throw user_error("{}: JSON nested deeper than {} levels", origin_, limits_.max_depth);
      }
      if (event == json::parse_event_t::object_start) keys_.emplace_back();
    }
    if (event == json::parse_event_t::object_end) keys_.pop_back();
    if (event == json::parse_event_t::key) {
      const auto& key = parsed.get_ref<const std::string&>();
      if (!keys_.back().insert(key).second)
        throw user_error("{}: the key {} is given twice", origin_, quote(key));
    }
    if (++values_ > limits_.max_values) {
      throw user_error("{}: more than {} JSON values", origin_, limits_.max_values);
    }
    return true;
  }

 private:
  std::string_view origin_;
  const JsonLimits& limits_;
  std::vector<std::unordered_set<std::string>> keys_;
  int64_t values_ = 0;
};

}  // namespace

json parse_json(std::string_view text, std::string_view origin, const JsonLimits& limits) {
  if (text.size() > limits.max_bytes) {
    throw user_error("{}: {} bytes of JSON, more than the {} expected here", origin, text.size(),
                     limits.max_bytes);
  }
  Guard guard(origin, limits);
  try {
    return json::parse(text.begin(), text.end(), std::ref(guard));
  } catch (const json::parse_error& error) {
    throw user_error("{}: not valid JSON at byte {}", origin, error.byte);
  } catch (const json::exception&) {
    throw user_error("{}: a number is outside the range of a double", origin);
  }
}

json read_json(const std::filesystem::path& path, const JsonLimits& limits) {
  open_regular_file(path);  // refuses a named pipe, on which reading would block
  return parse_json(read_file(path, limits.max_bytes), path.string(), limits);
}

std::string quote(std::string_view text) {
  constexpr size_t kLongest = 120;
  std::string out = "'";
  for (char c : text.substr(0, kLongest)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte >= 0x7f || c == '\'' || c == '\\') {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
  if (text.size() > kLongest) out += "...";
  return out + "'";
}

}  // namespace biomoe
