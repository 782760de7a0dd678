// A trained model from a checkpoint of either kind, with what its data needs, for eval, generate and export.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "biomoe/data/data_config.h"
#include "biomoe/data/vocabulary.h"
#include "biomoe/model/model.h"

namespace biomoe {

struct LoadedModel {
  std::unique_ptr<Model> model;  // inference only
  Vocabulary vocabulary;
  DataConfig data;  // of the run; the defaults for a Hugging Face folder
  std::string path;
  int64_t step = -1;  // -1: not a training checkpoint
};

struct LoadOptions {
  int64_t num_threads = 0;
  int64_t max_seq_length = 0;  // 0: that of the run, else the smaller of 1024 and max_position_embeddings
  int64_t max_tokens = 0;      // 0: as in the run
};

// `path`: a run folder, its checkpoints folder, a step folder, or a Hugging Face folder. Throws user_error.
LoadedModel load_model(const std::filesystem::path& path, const LoadOptions& options = {});

}  // namespace biomoe
