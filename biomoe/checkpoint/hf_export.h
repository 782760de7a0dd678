// Writes Hugging Face Mixtral checkpoints that `transformers` 4 and 5 load.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "biomoe/checkpoint/hf_config.h"
#include "biomoe/model/model_config.h"
#include "biomoe/model/parameters.h"

namespace biomoe {

struct HfExportOptions {
  DType dtype = DType::kF32;  // or BF16, F16: rounded to nearest even
  uint64_t max_shard_bytes = uint64_t{5'000'000'000};
  HfTokenIds tokens = {};
  nlohmann::json dataset = {};  // object under "biomoe_dataset" in config.json: how the model's data is read
  bool overwrite = false;       // replace an earlier export at the destination
  std::map<std::string, std::string> extra_files = {};  // name -> bytes, e.g. tokenizer.json
};

struct HfExportReport {
  int64_t files = 0;
  int64_t tensors = 0;
  uint64_t bytes = 0;  // of all files
};

// Writes config.json, generation_config.json and model.safetensors (or shards and their index) in the hub
// layout, into a hidden folder beside `destination` that is then renamed to it: the destination appears whole
// or not at all. Memory: two blocks of 1 MiB. user_error when the destination exists and is not empty, unless
// `overwrite` is set and all it holds are files that an export wrote: a config.json with biomoe_version, what
// else it writes, the shards that its index names, and the tokenizer; failure when a finite weight is too
// large for the type (naming the tensor), or the disk refuses.
HfExportReport export_hf(const std::filesystem::path& destination, const ModelConfig& config,
                         const ParameterList& parameters, const float* arena,
                         const HfExportOptions& options = {});

// "5GB", "500MB", "120KB" (powers of 1000), "2GiB", "100MiB", "64KiB" (powers of 1024), or bytes: as
// transformers reads max_shard_size. user_error for anything else, and for 0.
uint64_t parse_byte_size(std::string_view text);

}  // namespace biomoe
