// A model for tests of whole steps on the GPU.
#pragma once

#include "tests/unit/model/model_test_util.h"

namespace biomoe::test {

// small_config() at widths that all of the GPU's kernels take, native products of codes too.
inline ModelConfig coded_config() {
  ModelConfig config = small_config();
  config.hidden_size = 128;
  config.intermediate_size = 256;
  config.head_dim = 32;
  config.initializer_range = 0.1;  // larger weights amplify the rounding of BF16 from layer to layer
  return config;
}

}  // namespace biomoe::test
