// A trained model from a checkpoint of either kind, with what its data needs, for eval, generate and export.
#pragma once

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "biomoe/checkpoint/hf_config.h"
#include "biomoe/data/data_config.h"
#include "biomoe/data/vocabulary.h"
#include "biomoe/model/model.h"
#include "biomoe/train/run_config.h"

namespace biomoe {

// What a checkpoint says of its model and its data; no weights.
struct OpenedCheckpoint {
  std::string path{};  // of the step folder, or the Hugging Face folder
  bool hugging_face = false;
  int64_t step = -1;  // -1: not a training checkpoint
  ModelConfig model{};
  HfTokenIds tokens{};  // of a Hugging Face config.json, also of one that was imported; empty for other runs
  DataConfig data{};    // of the run; tokenizer_name_or_path is empty where nothing says which it is
};

// `path`: a run folder, its checkpoints folder, a step folder, or a Hugging Face folder. `tokenizer`, where
// it is not empty, stands for the one that the checkpoint names. Throws user_error.
OpenedCheckpoint open_checkpoint(const std::filesystem::path& path, const std::string& tokenizer = "");

// The vocabulary of its tokenizer. Throws user_error when nothing says which it is, or it has more entries
// than the model.
Vocabulary open_vocabulary(const OpenedCheckpoint& checkpoint);

// Fills the model's weights, which are made from checkpoint.model. Throws user_error.
void load_weights(const OpenedCheckpoint& checkpoint, Model& model);

// How the data of a Hugging Face folder is read: as the run that exported it did; of other folders with the
// defaults, a window of at most 1024 tokens, and lower case as its tokenizer.json has it.
// tokenizer_name_or_path is `tokenizer`, else the folder's tokenizer.json, else empty. Throws user_error.
DataConfig hugging_face_data(const HfConfig& config, const std::filesystem::path& folder,
                             const std::string& tokenizer = "");

// The settings of `data` on which scores depend, for HfExportOptions::dataset: hugging_face_data reads them
// back.
nlohmann::json scoring_json(const DataConfig& data);

struct LoadedModel {
  std::unique_ptr<Model> model;  // inference only
  Vocabulary vocabulary;
  DataConfig data;  // of the checkpoint, under LoadOptions
  std::string path;
  int64_t step = -1;  // -1: not a training checkpoint
};

struct LoadOptions {
  DeviceChoice device = DeviceChoice::kCpu;
  int64_t num_threads = 0;
  int64_t max_seq_length = 0;  // 0: that of the data, at most max_position_embeddings
  int64_t max_tokens = 0;      // 0: as in the run
  std::string tokenizer = {};  // empty: that of the checkpoint
};

// What the model runs on and computes in, for people: "cpu, fp32" or "NVIDIA H200, bf16".
std::string describe_device(const Model& model);

// `path` as for open_checkpoint. Throws user_error, also for a device that is asked for and cannot be used.
LoadedModel load_model(const std::filesystem::path& path, const LoadOptions& options = {});

}  // namespace biomoe
