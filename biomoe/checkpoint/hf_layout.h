// The names and shapes under which `transformers` keeps a Mixtral model's tensors, as pieces of our flat
// parameter arena.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "biomoe/checkpoint/tensor_index.h"
#include "biomoe/core/tensor_view.h"
#include "biomoe/model/parameters.h"

namespace biomoe {

enum class HfLayout {
  kHub,      // model.layers.L.block_sparse_moe.{gate.weight, experts.N.w1|w2|w3.weight}: files on the hub
  kInMemory  // model.layers.L.mlp.{gate.weight, experts.gate_up_proj, experts.down_proj}: state_dict() of
             // version 5
};
std::string_view hf_layout_name(HfLayout layout);

struct HfPiece {
  std::string name;
  Shape shape;
  int64_t offset;  // elements from the start of the arena; the piece is contiguous there
};

// All of the model's parameters in that layout, each element of each parameter in one piece. `prefix` is
// "model." in a causal-LM checkpoint and "" in one that the bare MixtralModel saved.
std::vector<HfPiece> hf_pieces(const ParameterList& parameters, HfLayout layout,
                               std::string_view prefix = "model.");

// Which tensors fill which pieces; every tensor of the folder and every piece is accounted for.
struct HfMatch {
  struct Source {
    HfPiece piece;
    TensorFolder::Place place;
  };
  HfLayout layout = HfLayout::kHub;
  std::vector<Source> sources;
  TensorFolder::Place
      tied_head;  // an lm_head.weight that must equal the embedding; absent when there is none
  std::vector<std::string> notes;  // harmless tensors passed over
};

// user_error, one line with the first few names: tensors missing, left over, of another shape or of no
// floating-point type, or both layouts in one checkpoint. Reads no data.
HfMatch match_hf_tensors(const TensorFolder& folder, const ModelConfig& config,
                         const ParameterList& parameters);

}  // namespace biomoe
