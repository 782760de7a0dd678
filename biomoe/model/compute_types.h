// What a device computes in: types, and layouts that its kernels want.
#pragma once

#include <cstdint>

#include "biomoe/core/context.h"
#include "biomoe/model/model_config.h"
#include "biomoe/ops/cuda_sizes.h"

namespace biomoe {

struct ComputeTypes {
  DType activation = DType::kF32;  // of activations and of the weights that products read
  DType gradient = DType::kF32;    // of the parameters' gradients
  int64_t row_alignment = 1;       // rows of an expert are padded to a multiple of this
  int64_t gate_up_interleave = 0;  // see ops/scaled_swiglu.h; the hub's layout is 0
};

// CPU: fp32 throughout. GPU: bf16, with fp32 gradients where micro-batches are summed; expert rows in tiles
// of 128, and gate and up columns in turns of 32, so that one thread of a fused product holds both of a pair.
inline ComputeTypes compute_types(Device device, const ModelConfig& config, bool accumulate_gradients) {
  if (device == Device::kCpu) return {};
  const bool interleaves = config.intermediate_size % cuda::kGateUpInterleave == 0;
  return {.activation = DType::kBF16,
          .gradient = accumulate_gradients ? DType::kF32 : DType::kBF16,
          .row_alignment = cuda::kExpertRowAlignment,
          .gate_up_interleave = interleaves ? cuda::kGateUpInterleave : 0};
}

}  // namespace biomoe
