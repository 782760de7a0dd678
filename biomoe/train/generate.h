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

enum class GenerateStop : uint8_t {
  kMaxNewTokens,
  kEos,
  kWindowFull,  // the model's window holds no further token to continue from
};

struct Generated {
  std::string text;  // without the prompt
  int64_t tokens = 0;
  GenerateStop stop = GenerateStop::kMaxNewTokens;
};

// The prompt's continuation. Only bases are drawn, and EOS, which ends it. Token n depends on the seed, on n
// and on what stands before it alone. Throws user_error for options out of range and for a prompt that is
// empty (where the model has no BOS to start from), that the vocabulary cannot express or that exceeds the
// model's window.
Generated generate(LoadedModel& loaded, const GenerateOptions& options);

}  // namespace biomoe
