// Parameters between the host, in fp32 and the layout of the hub, and a flat arena of a device, in its type
// and layout.
#pragma once

#include <vector>

#include "biomoe/core/context.h"
#include "biomoe/model/compute_types.h"
#include "biomoe/model/parameters.h"

namespace biomoe {

class ParameterIo {
 public:
  ParameterIo(Context& ctx, const ComputeTypes& types) : ctx_(ctx), types_(types) {}

  // values[0, spec.num_elements()) -> the parameter in arena_A (f32 or bf16, rounded to nearest even). Waits
  // for the device.
  void write_sync(const ParamSpec& spec, const float* values, const TensorView& arena_A);
  void read_sync(const ParamSpec& spec, const TensorView& arena_A, float* values);

 private:
  bool interleaved(const ParamSpec& spec) const;
  // Row of the hub's gate_up_proj [2F, D] that row `row` of the device's holds.
  int64_t hub_row(const ParamSpec& spec, int64_t row) const;

  Context& ctx_;
  ComputeTypes types_;
  std::vector<unsigned char> buffer_;
};

}  // namespace biomoe
