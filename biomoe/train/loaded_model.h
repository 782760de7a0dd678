// A trained model from a checkpoint of either kind, with what its data needs, for eval, generate and export.
#pragma once

#include <filesystem>
#include <memory>
#include <string>

#include "biomoe/data/data_config.h"
#include "biomoe/data/vocabulary.h"
#include "biomoe/model/model.h"
#include "biomoe/train/run_config.h"

namespace biomoe {

struct LoadedModel {
  std::unique_ptr<Model> model;  // inference only
  Vocabulary vocabulary;
  DataConfig data;  // of the run; the defaults for a Hugging Face folder
  std::string path;
  int64_t step = -1;  // -1: not a training checkpoint
};

struct LoadOptions {
  DeviceChoice device = DeviceChoice::kCpu;
  int64_t num_threads = 0;
  int64_t max_seq_length = 0;  // 0: that of the run, else the smaller of 1024 and max_position_embeddings
  int64_t max_tokens = 0;      // 0: as in the run
};

// What the model runs on and computes in, for people: "cpu, fp32" or "NVIDIA H200, bf16".
std::string describe_device(const Model& model);

// `path`: a run folder, its checkpoints folder, a step folder, or a Hugging Face folder. Throws user_error,
// also for a device that is asked for and cannot be used.
LoadedModel load_model(const std::filesystem::path& path, const LoadOptions& options = {});

}  // namespace biomoe
