// What a checkpoint folder of either kind holds, and whether it is sound; for `biomoe checkpoint inspect` and
// `verify`.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

namespace biomoe {

// {"kind": "training" | "huggingface", "path", "groups": [{"name", "files", "tensors", "parameters", "bytes",
// "dtypes": {name: tensors}}], "parameters", "bytes", "notes"}, and
//   training:     "step", "save_index", "biomoe_version", "state" (the trainer's, without config_yaml)
//   huggingface:  "layout", "sharded", "config" (as read), "active_parameters"
// `parameters` counts the model's elements (of the group "model" or of all tensors), `bytes` all groups.
// Structure is checked, values are not read. `path` may also be a run folder or its checkpoints folder: the
// latest good one is meant. user_error when it is neither kind or is damaged.
nlohmann::json summarise_checkpoint(const std::filesystem::path& path);

// {"kind", "path", "ok", "files", "bytes", "problems": [lines], "notes": [lines]}. training: structure, sizes
// and checksums of every file; of a run, also the checkpoints that latest_good passes over. huggingface:
// configuration, index, shards, names and shapes of all tensors, tied embeddings, and that every weight is
// finite (these folders carry no checksums). Never throws for what is wrong with the files.
nlohmann::json verify_any_checkpoint(const std::filesystem::path& path);

// The same for people, several lines each ending with a line break.
std::string summary_text(const nlohmann::json& summary);
std::string verify_text(const nlohmann::json& result);

}  // namespace biomoe
