// Parameters between the host, in fp32 and the layout of the hub, and a flat arena of a device, in its type
// and layout.
#pragma once

#include <vector>

#include "biomoe/core/context.h"
#include "biomoe/dist/comm.h"
#include "biomoe/model/compute_types.h"
#include "biomoe/model/parameters.h"

namespace biomoe {

// An arena of state, and which part of the parameter is in it.
struct StateArena {
  TensorView arena_A;
  StateOwners owners;
  Comm* copies = nullptr;  // the ranks that hold copies, where that is more than one
};

// A parameter that is whole in one of the model's arenas, see ParamSpec::held.
StateArena whole_arena(const ParamSpec& spec, const TensorView& arena_A);

class ParameterIo {
 public:
  ParameterIo(Context& ctx, const ComputeTypes& types) : ctx_(ctx), types_(types) {}

  // values[0, spec.num_elements()) -> the parameter in arena_A: f32; or bf16 or u16, the weight or the
  // remainder of a SplitMaster (ops/adamw.h). Waits for the device.
  void write_sync(const ParamSpec& spec, const float* values, const TensorView& arena_A);
  void read_sync(const ParamSpec& spec, const TensorView& arena_A, float* values);

  // The same for state, of which this rank's stretch is written. Read are the elements
  // [own().begin, own().end()) of `values`, the others have no meaning; since those are other elements in the
  // layout of the device where it differs from the hub's, the ranks that hold copies call this together.
  void write_state_sync(const ParamSpec& spec, const float* values, const StateArena& state);
  void read_state_sync(const ParamSpec& spec, const StateArena& state, float* values);
  // Masters from the two arenas that hold their parts: weights, and remainders.
  void read_masters_sync(const ParamSpec& spec, const StateArena& weights, const StateArena& remainders,
                         float* values);

 private:
  bool interleaved(const ParamSpec& spec) const;
  // Row of the hub's gate_up_proj [2F, D] that row `row` of the device's holds.
  int64_t hub_row(const ParamSpec& spec, int64_t row) const;

  // The parameter in the layout of the device, converted to `dtype`, in buffer_.
  void convert_to_buffer(const ParamSpec& spec, const float* values, DType dtype);
  // The parameter's bytes on the host, from the device through `buffer` where need be.
  const unsigned char* fetch_sync(const ParamSpec& spec, const TensorView& arena_A,
                                  std::vector<unsigned char>& buffer);
  const unsigned char* fetch_state_sync(const ParamSpec& spec, const StateArena& state,
                                        std::vector<unsigned char>& buffer);
  void convert_rows(const ParamSpec& spec, const unsigned char* source, DType dtype, float* values) const;

  Context& ctx_;
  ComputeTypes types_;
  std::vector<unsigned char> buffer_, remainders_;
};

}  // namespace biomoe
