// What training in an 8-bit recipe keeps beside the model: memory for quantised operands, and the scales and
// amax histories of DelayedScaling.
#pragma once

#include <array>
#include <vector>

#include "biomoe/core/arena.h"
#include "biomoe/core/context.h"
#include "biomoe/model/compute_types.h"
#include "biomoe/model/model_config.h"
#include "biomoe/moe/operand_quantizer.h"
#include "biomoe/quant/recipe.h"

namespace biomoe {

// How the products of one block quantise their operands.
struct BlockQuantizers {
  OperandQuantizer qkv, out, gate_up, down;
};

class Fp8State {
 public:
  Fp8State() = default;  // nothing is quantised
  // For micro-batches of up to `tokens` tokens. Waits for the device.
  Fp8State(Context& ctx, const ModelConfig& model, const Fp8Config& config, const ComputeTypes& types,
           int64_t tokens, bool training);
  static size_t planned_bytes(const ModelConfig& model, const Fp8Config& config, const ComputeTypes& types,
                              int64_t tokens, bool training);

  // Layers that config_kwargs.layer_precision leaves out quantise nothing. The state must outlive what is
  // returned.
  BlockQuantizers block(int64_t layer) const;

  // DelayedScaling: amax of a step are gathered from start_step on; finish_step makes the next step's scales.
  void start_step(Context& ctx);
  void finish_step(Context& ctx);
  bool delayed() const { return static_cast<bool>(memory_.scales_N); }
  TensorView amax_HN() const { return memory_.amax_HN; }    // on the device, as the next
  TensorView scales_N() const { return memory_.scales_N; }  // N: layers x products x operands x groups

 private:
  struct Memory {
    std::array<TensorView, 3> operands;
    TensorView amax_HN, scales_N, formats_N;
  };
  static Memory lay_out(TensorAllocator& allocator, const ModelConfig& model, const Fp8Config& config,
                        const ComputeTypes& types, int64_t tokens, bool training);

  Fp8Config config_;
  std::vector<bool> quantized_layers_;
  int64_t experts_ = 0;
  Arena arena_;
  Memory memory_;
};

// Whether layer `layer` of the model is trained in 8 bits where fp8_config.enabled.
bool fp8_layer(const ModelConfig& model, int64_t layer);

}  // namespace biomoe
