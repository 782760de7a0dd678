// What a trainer puts beside its tensors so that a run continues where it was.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

namespace biomoe {

struct TrainingState {
  int64_t step = 0;            // steps done
  int64_t optimizer_step = 0;  // updates done: the t of Adam's bias correction
  uint64_t seed = 0;           // with the counters below, the whole state of the counter-based RNG
  int64_t world_size = 1;      // of the run that saved; any other may load
  int64_t dp = 1;
  int64_t ep = 1;
  // Objects: the loader's position, opaque here; the model's configuration, for first_difference; anything
  // else.
  nlohmann::json data = nlohmann::json::object();
  nlohmann::json model = nlohmann::json::object();
  nlohmann::json extra = nlohmann::json::object();
  std::string config_yaml;  // the resolved configuration of the run

  nlohmann::json to_json() const;
  // user_error naming `origin` and the key that is missing or of the wrong type.
  static TrainingState from_json(const nlohmann::json& json, const std::string& origin);
};

// The first key (in alphabetical order, as a path "a.b[2].c") where the two differ, as one line
// "hidden_size: the checkpoint has 256, this run has 512"; empty when they are equal. Numbers compare by
// value.
std::string first_difference(const nlohmann::json& checkpoint, const nlohmann::json& run);

}  // namespace biomoe
