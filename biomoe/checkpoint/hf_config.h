// ModelConfig <-> config.json of a `transformers` Mixtral checkpoint.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "biomoe/core/dtype.h"
#include "biomoe/model/model_config.h"

namespace biomoe {

inline constexpr char kHfDatasetKey[] = "biomoe_dataset";  // of an export's config.json

struct HfTokenIds {
  std::optional<int64_t> bos;
  std::vector<int64_t> eos;  // none, one, or several
  std::optional<int64_t> pad;
  bool operator==(const HfTokenIds&) const = default;
};

struct HfConfig {
  ModelConfig model;
  HfTokenIds tokens;
  std::optional<DType> dtype;      // as declared; the tensors' own types are what is read
  nlohmann::json dataset;          // "biomoe_dataset" of an export (see HfExportOptions); null when absent
  std::vector<std::string> notes;  // one line each: defaults taken, keys without effect here
};

// Reads the text of a config.json; `origin` names it in errors and notes. A key that is not there gets the
// default of `transformers`' Mixtral, and a note when it decides what the model computes. user_error, one
// line with the key: not JSON, not Mixtral, a value of the wrong type or out of range, rope_theta in conflict
// with rope_parameters, and every feature that would change the model into one that this program does not
// compute (rope scaling, biases, quantisation, another activation).
HfConfig parse_hf_config(std::string_view text, const std::string& origin);

// Of FOLDER/config.json.
HfConfig read_hf_config(const std::filesystem::path& folder);

// What save_pretrained writes, with the keys of transformers 4 and 5 side by side (rope_theta and
// rope_parameters, torch_dtype and dtype). Read back by parse_hf_config, it gives the same ModelConfig.
nlohmann::json hf_config_json(const ModelConfig& model, const HfTokenIds& tokens, DType dtype);

// generation_config.json
nlohmann::json hf_generation_config_json(const HfTokenIds& tokens);

}  // namespace biomoe
