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

  // values[0, spec.num_elements()) -> the parameter in arena_A: f32; or bf16 or u16, the weight or the
  // remainder of a SplitMaster (ops/adamw.h). Waits for the device.
  void write_sync(const ParamSpec& spec, const float* values, const TensorView& arena_A);
  void read_sync(const ParamSpec& spec, const TensorView& arena_A, float* values);
  // Masters from the two arenas that hold their parts.
  void read_masters_sync(const ParamSpec& spec, const TensorView& weights_A, const TensorView& remainder_A,
                         float* values);

 private:
  bool interleaved(const ParamSpec& spec) const;
  // Row of the hub's gate_up_proj [2F, D] that row `row` of the device's holds.
  int64_t hub_row(const ParamSpec& spec, int64_t row) const;

  // The parameter's bytes on the host, from the device through `buffer` where need be.
  const unsigned char* fetch_sync(const ParamSpec& spec, const TensorView& arena_A,
                                  std::vector<unsigned char>& buffer);

  Context& ctx_;
  ComputeTypes types_;
  std::vector<unsigned char> buffer_, remainders_;
};

}  // namespace biomoe
