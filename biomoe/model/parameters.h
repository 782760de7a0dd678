// The one list of a model's parameters: names, shapes, places in the flat arenas, groups.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "biomoe/core/tensor_view.h"
#include "biomoe/dist/mesh.h"
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
// Of the experts' two a rank holds E / ep experts: `parts` is ep, and `first` the expert that comes first
// here.
struct ParamSpec {
  std::string name;
  Shape shape;  // of what this rank holds
  ParamKind kind;
  int64_t layer;      // -1 outside the layers
  int64_t offset;     // elements from the start of a flat arena of all that this rank holds
  int64_t held;       // the same in the model's arenas (weights, gradients); not offset where ranks shard
  int64_t first = 0;  // row of the whole parameter that row 0 here is
  int64_t parts = 1;  // ranks that the whole is split over
  int64_t num_elements() const { return shape.num_elements(); }
  Shape whole_shape() const;
  // Elements of the whole parameter before those of this rank.
  int64_t first_element() const { return shape.rank() == 0 ? 0 : first * (num_elements() / shape[0]); }
};

// A part of the flat arenas that a group of ranks holds in as many copies: dense parameters all ranks,
// experts those of dp. Each owns an equal part of it: it sums the gradients there, keeps the optimiser's
// state and makes the update (ZeRO-1). A region is of one stage of the forward pass.
//
// Where ranks shard (ZeRO-3), the model's arenas hold first what the rank owns, region after region as the
// optimiser's state, and then room for whole regions: two for the dense parameters of layers and two for
// their experts, which layers take in turns, and one each for the first and the last stage. A region without
// other copies is where it is owned.
struct ArenaRegion {
  int64_t stage = 0;
  int64_t begin = 0;  // of a flat arena, see ParamSpec::offset
  int64_t count = 0;  // divides by copies
  int64_t copy = 0;   // number of this rank in the group
  int64_t copies = 1;
  bool experts = false;
  int64_t held = 0;  // in the model's arenas, as the next
  int64_t own = 0;   // first element that this rank owns
  int64_t owned_count() const { return count / copies; }
  int64_t owned_begin() const { return begin + copy * owned_count(); }  // of a flat arena
  int64_t held_own() const { return held + copy * owned_count(); }      // what this rank owns in the whole
};

// The part of one parameter whose optimiser state a rank keeps.
struct StateStretch {
  int64_t begin = 0;  // elements of the parameter as it is held
  int64_t count = 0;
  int64_t place = 0;  // of the first of them in that rank's arenas of state
  int64_t end() const { return begin + count; }
};

// By the ranks that hold copies of a parameter (see ArenaRegion): together they keep all of its state.
struct StateOwners {
  std::vector<StateStretch> stretches;
  int64_t copy = 0;  // this rank
  bool experts = false;
  const StateStretch& own() const { return stretches[static_cast<size_t>(copy)]; }
};

class ParameterList {
 public:
  explicit ParameterList(const ModelConfig& config, const MeshPlace& place = {});

  const std::vector<ParamSpec>& specs() const { return specs_; }
  int64_t arena_elements() const { return arena_elements_; }  // of a flat arena, with alignment gaps
  int64_t held_elements() const { return held_elements_; }    // of the model's arenas
  bool shards() const { return shards_; }
  int64_t num_parameters() const;                      // of the whole model, without them
  int64_t num_active_parameters() const;               // a token's share: k of E experts
  const ParamSpec& find(std::string_view name) const;  // throws when there is none
  // Of one of specs(), where it is among them.
  size_t index_of(const ParamSpec& spec) const { return static_cast<size_t>(&spec - specs_.data()); }
  // The stages of the forward pass, in the order in which it first reads their parameters: the embedding,
  // of each layer what is dense and then the experts, and the final norm with the head.
  int64_t num_stages() const { return num_stages_; }
  static int64_t dense_stage(int64_t layer) { return 2 * layer + 1; }
  static int64_t experts_stage(int64_t layer) { return 2 * layer + 2; }
  // One a stage, one after the other in the arenas.
  const std::vector<ArenaRegion>& regions() const { return regions_; }
  const ArenaRegion& region(int64_t stage) const { return regions_[static_cast<size_t>(stage)]; }
  int64_t owned_elements() const;
  StateOwners state_owners(const ParamSpec& spec) const;
  // The parameter at `spec` in a flat arena of any type, and in one of the model's.
  static TensorView view(const TensorView& arena_A, const ParamSpec& spec) {
    return view_at(arena_A, spec, spec.offset);
  }
  static TensorView held_view(const TensorView& arena_A, const ParamSpec& spec) {
    return view_at(arena_A, spec, spec.held);
  }

 private:
  static TensorView view_at(const TensorView& arena_A, const ParamSpec& spec, int64_t place) {
    return TensorView(
        static_cast<uint8_t*>(arena_A.data) + static_cast<size_t>(place) * dtype_size(arena_A.dtype),
        arena_A.dtype, spec.shape);
  }
  int64_t stage_of(const ParamSpec& spec) const;
  void lay_out(ArenaRegion region);
  void hold();

  std::vector<ParamSpec> specs_;
  std::vector<ArenaRegion> regions_;
  int64_t arena_elements_ = 0;
  int64_t held_elements_ = 0;
  bool shards_ = false;
  int64_t num_stages_ = 0;
  int64_t experts_ = 1;
  int64_t top_k_ = 1;
};

}  // namespace biomoe
