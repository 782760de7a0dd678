// The one list of a model's parameters: names, shapes, places in the flat arenas, groups.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "biomoe/core/tensor_view.h"
#include "biomoe/model/model_config.h"

namespace biomoe {

enum class ParamKind : uint8_t { kEmbedding, kNorm, kAttention, kRouter, kExpert, kHead };

// Names are those of `transformers` in memory (MixtralForCausalLM.state_dict() of version 5):
//   model.embed_tokens.weight                              [V, D]
//   model.layers.L.input_layernorm.weight                  [D]
//   model.layers.L.self_attn.{q,k,v}_proj.weight           [H*K, D], [G*K, D], [G*K, D]   adjacent: one
//   [(H+2G)K, D] model.layers.L.self_attn.o_proj.weight                 [D, H*K]
//   model.layers.L.post_attention_layernorm.weight         [D]
//   model.layers.L.mlp.gate.weight                         [E, D]
//   model.layers.L.mlp.experts.gate_up_proj                [E, 2F, D]   gate rows first
//   model.layers.L.mlp.experts.down_proj                   [E, D, F]
//   model.norm.weight                                      [D]
//   lm_head.weight                                         [V, D]       absent when tie_word_embeddings
struct ParamSpec {
  std::string name;
  Shape shape;
  ParamKind kind;
  int64_t layer;   // -1 outside the layers
  int64_t offset;  // elements from the start of each flat arena (weights, gradients, moments)
  int64_t num_elements() const { return shape.num_elements(); }
};

class ParameterList {
 public:
  explicit ParameterList(const ModelConfig& config);

  const std::vector<ParamSpec>& specs() const { return specs_; }
  int64_t arena_elements() const { return arena_elements_; }  // with alignment gaps
  int64_t num_parameters() const;                             // without them
  int64_t num_active_parameters() const;                      // a token's share: k of E experts
  const ParamSpec& find(std::string_view name) const;         // throws when there is none
  // The parameter at `spec` in a flat arena of any type.
  TensorView view(const TensorView& arena_A, const ParamSpec& spec) const {
    return TensorView(
        static_cast<uint8_t*>(arena_A.data) + static_cast<size_t>(spec.offset) * dtype_size(arena_A.dtype),
        arena_A.dtype, spec.shape);
  }

 private:
  std::vector<ParamSpec> specs_;
  int64_t arena_elements_ = 0;
  int64_t experts_ = 1;
  int64_t top_k_ = 1;
};

}  // namespace biomoe
