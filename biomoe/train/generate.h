// Sampling sequences from a model.
#pragma once

#include <cstdint>
#include <string>

#include "biomoe/train/loaded_model.h"

namespace biomoe {

struct GenerateOptions {
  std::string prompt;
  int64_t max_new_tokens = 100;
  double temperature = 1.0;  // 0: always the most probable
  int64_t top_k = 0;         // 0: all
  double top_p = 1.0;
  uint64_t seed = 0;
};

// The prompt's continuation, without the prompt; ends early at EOS. The whole context runs again for every
// token. Throws user_error for a prompt the vocabulary cannot express or that fills the model's window.
std::string generate(LoadedModel& loaded, const GenerateOptions& options);

}  // namespace biomoe
