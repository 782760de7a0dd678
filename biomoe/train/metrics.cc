#include "biomoe/train/metrics.h"

#include <cerrno>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "biomoe/core/error.h"
#include "biomoe/core/file.h"

namespace biomoe {
namespace {

using Json = nlohmann::ordered_json;

// The step of a complete line of ours; no value for anything else.
std::optional<int64_t> step_of(std::string_view line) {
  const Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("step") || !json["step"].is_number_integer()) return std::nullopt;
  return json["step"].get<int64_t>();
}

void trim(const std::filesystem::path& path, int64_t last_step) {
  if (!std::filesystem::exists(path)) return;
  const std::string text = read_file(path);
  std::string kept;
  int64_t number = 0;
  int64_t torn = 0;  // number of the first line that is not ours
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = text.find('\n', begin);
    const std::string_view line = std::string_view(text).substr(begin, end - begin);
    begin = end == std::string::npos ? text.size() : end + 1;
    ++number;
    const auto step = end == std::string::npos ? std::nullopt : step_of(line);
    if (!step) {
      if (torn == 0) torn = number;
      continue;
    }
    // A crash can only tear the end of what was written; damage before a good line is something else.
    if (torn != 0) {
      throw user_error("{}:{}: not a line of metrics (an object with a step); mend it or move the file away",
                       path.string(), torn);
    }
    if (*step <= last_step) kept.append(line).push_back('\n');
  }
  if (kept != text) replace_file(path, kept);
}

// Replaces NaN and infinities in `value` by null and names their places in `found`.
void take_nonfinite(Json& value, const std::string& pointer, Json& found) {
  if (value.is_number_float()) {
    const double number = value.get<double>();
    if (std::isfinite(number)) return;
    found[pointer] = std::isnan(number) ? "nan" : number > 0 ? "inf" : "-inf";
    value = nullptr;
  } else if (value.is_structured()) {
    for (auto item = value.begin(); item != value.end(); ++item) {
      const std::string key =
          value.is_object() ? item.key() : std::to_string(std::distance(value.begin(), item));
      take_nonfinite(*item, fmt::format("{}/{}", pointer, key), found);
    }
  }
}

}  // namespace

MetricsWriter::MetricsWriter(std::filesystem::path path, int64_t last_step) : path_(std::move(path)) {
  trim(path_, last_step);
  file_ = open_to_append(path_);
}

void MetricsWriter::write(Json line) {
  BM_CHECK(line.is_object() && line.contains("step") && line["step"].is_number_integer(),
           "a line of metrics is an object with an integer step");
  Json found = Json::object();
  take_nonfinite(line, "", found);
  if (!found.empty()) line["nonfinite"] = std::move(found);
  const std::string text = line.dump(-1, ' ', false, Json::error_handler_t::replace) + '\n';
  if (!write_all(file_.get(), text)) {
    throw failure("{}: cannot write: {}", path_.string(), std::strerror(errno));
  }
}

}  // namespace biomoe
