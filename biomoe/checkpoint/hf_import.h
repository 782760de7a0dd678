// Reads the weights of a Hugging Face Mixtral checkpoint.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "biomoe/checkpoint/hf_layout.h"
#include "biomoe/model/model_config.h"
#include "biomoe/model/parameters.h"

namespace biomoe {

struct HfImportReport {
  HfLayout layout = HfLayout::kHub;
  int64_t files = 0;
  int64_t tensors = 0;
  uint64_t bytes = 0;
  std::vector<std::string> notes;
};

// Fills `arena` (parameters.arena_elements() floats; alignment gaps are left as they are) from
// FOLDER/model.safetensors or its shards, in either layout, from F32, BF16 or F16 (exact). `config` is that
// of FOLDER/config.json (read_hf_config), and `parameters` is made from it: of the experts a rank reads those
// that it holds. Everything is checked before the
// first value is written: see TensorFolder and match_hf_tensors; also user_error when tied embeddings come
// with an lm_head.weight that differs.
HfImportReport import_hf(const std::filesystem::path& folder, const ModelConfig& config,
                         const ParameterList& parameters, float* arena);

// user_error when match.tied_head holds other values than the embedding.
void check_tied_head(const HfMatch& match);

}  // namespace biomoe
