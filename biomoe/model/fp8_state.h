// What training in an 8-bit recipe keeps beside the model: memory for quantised operands, the codes
// of weights where products are native, and the scales and amax histories of DelayedScaling.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "biomoe/core/arena.h"
#include "biomoe/core/context.h"
#include "biomoe/dist/mesh.h"
#include "biomoe/model/compute_types.h"
#include "biomoe/model/model_config.h"
#include "biomoe/moe/moe_layer.h"
#include "biomoe/moe/operand_quantizer.h"
#include "biomoe/quant/recipe.h"

namespace biomoe {

// How the products of one block quantise their operands.
struct BlockQuantizers {
  OperandQuantizer qkv, out, gate_up, down;
};

struct Fp8StateShape {
  Fp8Config config{};
  ComputeTypes types{};
  int64_t tokens = 0;  // of a micro-batch, at most
  bool training = true;
  Device device = Device::kCpu;
  ExpertFfnMode mode = ExpertFfnMode::kGroupedLinear;
  ExpertSplit split{};
  MeshPlace place{};  // of this rank, which of the split's it is
};

class Fp8State {
 public:
  Fp8State() = default;  // nothing is quantised
  // Waits for the device.
  Fp8State(Context& ctx, const ModelConfig& model, const Fp8StateShape& shape);
  static size_t planned_bytes(const ModelConfig& model, const Fp8StateShape& shape);

  // Layers that config_kwargs.layer_precision leaves out quantise nothing. The state must outlive what is
  // returned.
  BlockQuantizers block(int64_t layer) const;

  // What describe_products tells.
  const std::string& describe() const { return description_; }

  // DelayedScaling: amax of a step are gathered from start_step on; finish_step makes the next step's scales.
  // Between ranks, each of which holds the scales of all experts, share_amax comes before it.
  void start_step(Context& ctx);
  void share_amax(Context& ctx, Comm& world);
  void finish_step(Context& ctx);
  bool delayed() const { return static_cast<bool>(memory_.scales_N); }
  TensorView amax_HN() const { return memory_.amax_HN; }  // on the device, as the next
  // N: layers x products x operands x groups; the experts' groups are those of all ranks.
  TensorView scales_N() const { return memory_.scales_N; }

 private:
  using BlockCodes = std::array<LayerCodes, 4>;  // qkv, out, gate_up, down
  using BlockMxWeights = std::array<MxWeights, 4>;
  struct Memory {
    std::array<TensorView, 3> operands;
    std::vector<BlockCodes> codes;  // by layer
    std::array<MxCodes, 4> mx;      // as BlockCodes: the memory of all, absent for those that are emulated
    std::vector<BlockMxWeights> mx_weights;  // by layer
    TensorView amax_HN, scales_N, formats_N;
  };
  static Memory lay_out(TensorAllocator& allocator, const ModelConfig& model, const Fp8StateShape& shape);
  static void lay_out_codes(TensorAllocator& allocator, const ModelConfig& model, const Fp8StateShape& shape,
                            Memory& memory);
  static void lay_out_mx_weights(TensorAllocator& allocator, const ModelConfig& model,
                                 const Fp8StateShape& shape, Memory& memory);

  Fp8Config config_;
  std::string description_;
  std::vector<bool> quantized_layers_;
  int64_t experts_ = 0;                // of the model
  int64_t first_held_ = 0, held_ = 0;  // of them, on this rank
  Arena arena_;
  Memory memory_;
};

// How products run, in a line; "" where nothing is quantised.
std::string describe_products(const ModelConfig& model, const Fp8StateShape& shape);

// Whether layer `layer` of the model is trained in 8 bits where fp8_config.enabled.
bool fp8_layer(const ModelConfig& model, int64_t layer);

// Weights of such layers in elements, by how their products run.
struct QuantizedWeights {
  int64_t native = 0, emulated = 0, kept = 0;  // that this rank holds; kept: emulated, see MxWeights
  int64_t native_active = 0;                   // of all ranks, those that a token is multiplied with
};
QuantizedWeights quantized_weights(const ModelConfig& model, const Fp8StateShape& shape);

// Whether the experts' products of every layer multiply MXFP8BlockScaling's codes on `device`. They are the
// only ones of all experts at once that such a GPU has, and sum no squares of weight gradients.
bool mx_experts(const ModelConfig& model, const Fp8Config& config, Device device);

// Whether in such a layer what the experts' activation computes goes on as codes (see Sequential::codes_at
// and ExpertsKeep).
bool passes_codes(const ModelConfig& model, const Fp8StateShape& shape);

}  // namespace biomoe
