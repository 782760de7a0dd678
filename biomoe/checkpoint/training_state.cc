#include "biomoe/checkpoint/training_state.h"

#include <set>

#include "biomoe/checkpoint/json_text.h"
#include "biomoe/core/error.h"

namespace biomoe {
namespace {

using nlohmann::json;

int64_t count_at(const json& object, const char* key, const std::string& origin) {
  if (!object.contains(key)) throw user_error("{}: {} is missing", origin, key);
  const json& value = object.at(key);
  if (!value.is_number_unsigned() || value.get<uint64_t>() > uint64_t{1} << 62) {
    throw user_error("{}: {} is not a count", origin, key);
  }
  return value.get<int64_t>();
}

std::string brief(const json* value) {
  if (!value) return "nothing";
  const std::string text = value->dump(-1, ' ', true, json::error_handler_t::replace);
  return text.size() > 80 ? text.substr(0, 77) + "..." : text;
}

std::string difference_line(const std::string& path, const json* a, const json* b) {
  return fmt::format("{}: the checkpoint has {}, this run has {}", path, brief(a), brief(b));
}

std::string difference_at(const std::string& path, const json& a, const json& b) {
  if (a == b) return "";
  if (a.is_object() && b.is_object()) {
    std::set<std::string> keys;
    for (const auto& item : a.items()) keys.insert(item.key());
    for (const auto& item : b.items()) keys.insert(item.key());
    for (const auto& key : keys) {
      const std::string inner = path.empty() ? key : path + "." + key;
      const auto in_a = a.find(key), in_b = b.find(key);
      if (in_a == a.end()) return difference_line(inner, nullptr, &*in_b);
      if (in_b == b.end()) return difference_line(inner, &*in_a, nullptr);
      const std::string line = difference_at(inner, *in_a, *in_b);
      if (!line.empty()) return line;
    }
  }
  if (a.is_array() && b.is_array() && a.size() == b.size()) {
    for (size_t i = 0; i < a.size(); ++i) {
      const std::string line = difference_at(fmt::format("{}[{}]", path, i), a[i], b[i]);
      if (!line.empty()) return line;
    }
  }
  return difference_line(path.empty() ? "value" : path, &a, &b);
}

}  // namespace

json TrainingState::to_json() const {
  return {{"step", step},
          {"optimizer_step", optimizer_step},
          {"seed", seed},
          {"world_size", world_size},
          {"mesh", {{"dp", dp}, {"ep", ep}}},
          {"data", data},
          {"model", model},
          {"config_yaml", config_yaml},
          {"extra", extra}};
}

TrainingState TrainingState::from_json(const json& object, const std::string& origin) {
  if (!object.is_object()) throw user_error("{}: the training state is not an object", origin);
  TrainingState state;
  state.step = count_at(object, "step", origin);
  state.optimizer_step = count_at(object, "optimizer_step", origin);
  if (!object.contains("seed") || !object.at("seed").is_number_unsigned()) {
    throw user_error("{}: seed is missing or not a number", origin);
  }
  state.seed = object.at("seed").get<uint64_t>();
  state.world_size = count_at(object, "world_size", origin);
  if (!object.contains("mesh") || !object.at("mesh").is_object())
    throw user_error("{}: mesh is missing", origin);
  state.dp = count_at(object.at("mesh"), "dp", origin);
  state.ep = count_at(object.at("mesh"), "ep", origin);
  if (!object.contains("config_yaml") || !object.at("config_yaml").is_string()) {
    throw user_error("{}: config_yaml is missing or not text", origin);
  }
  state.config_yaml = object.at("config_yaml").get<std::string>();
  for (const auto& [key, member] : {std::pair{"data", &TrainingState::data},
                                    {"model", &TrainingState::model},
                                    {"extra", &TrainingState::extra}}) {
    const auto value = object.find(key);
    if (value == object.end() || !(value->is_object() || value->is_null()))
      throw user_error("{}: {} is missing or not an object", origin, key);
    if (value->is_object()) state.*member = *value;
  }
  return state;
}

std::string first_difference(const json& checkpoint, const json& run) {
  return difference_at("", checkpoint, run);
}

}  // namespace biomoe
