#include "biomoe/checkpoint/hf_layout.h"

#include <map>

#include "biomoe/checkpoint/convert.h"
#include "biomoe/checkpoint/json_text.h"
#include "biomoe/core/error.h"

namespace biomoe {
namespace {

constexpr std::string_view kModelPrefix = "model.";
constexpr std::string_view kGate = "mlp.gate.weight";
constexpr std::string_view kGateUp = "mlp.experts.gate_up_proj";
constexpr std::string_view kDown = "mlp.experts.down_proj";
constexpr char kHead[] = "lm_head.weight";
constexpr char kEmbedding[] = "embed_tokens.weight";
constexpr size_t kNamesShown = 4;

// "model.layers.3." of "model.layers.3.mlp.gate.weight" when the rest is `tail`, else nothing.
bool split_tail(const std::string& name, std::string_view tail, std::string& head) {
  if (name.size() < tail.size() || name.compare(name.size() - tail.size(), tail.size(), tail) != 0)
    return false;
  head = name.substr(0, name.size() - tail.size());
  return true;
}

void add_hub_experts(const ParamSpec& spec, const std::string& layer, std::vector<HfPiece>& pieces) {
  const int64_t experts = spec.shape[0], rows = spec.shape[1], columns = spec.shape[2];
  const bool gate_up = spec.name.find(kGateUp) != std::string::npos;
  for (int64_t e = 0; e < experts; ++e) {
    const std::string expert = fmt::format("{}block_sparse_moe.experts.{}.", layer, e);
    const int64_t offset = spec.offset + e * rows * columns;
    if (gate_up) {  // [E, 2F, D]: the gate w1, then the up projection w3
      pieces.push_back({expert + "w1.weight", {rows / 2, columns}, offset});
      pieces.push_back({expert + "w3.weight", {rows / 2, columns}, offset + rows / 2 * columns});
    } else {
      pieces.push_back({expert + "w2.weight", {rows, columns}, offset});
    }
  }
}

std::string list_names(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < names.size() && i < kNamesShown; ++i) text += (i ? ", " : "") + quote(names[i]);
  if (names.size() > kNamesShown) text += fmt::format(" and {} more", names.size() - kNamesShown);
  return text;
}

HfLayout find_layout(const TensorFolder& folder) {
  const std::string* hub = nullptr;
  const std::string* in_memory = nullptr;
  for (const auto& [name, place] : folder.tensors()) {
    if (!hub && name.find(".block_sparse_moe.") != std::string::npos) hub = &name;
    if (!hub && name.rfind("block_sparse_moe.", 0) == 0) hub = &name;
    if (!in_memory && name.find(".mlp.") != std::string::npos) in_memory = &name;
  }
  if (hub && in_memory) {
    throw user_error("{}: mixes two layouts of Mixtral, as in {} and {}; save the model anew",
                     folder.origin(), quote(*hub), quote(*in_memory));
  }
  if (!hub && !in_memory) {
    throw user_error(
        "{}: there are neither block_sparse_moe nor mlp tensors; this is not a Mixtral checkpoint",
        folder.origin());
  }
  return hub ? HfLayout::kHub : HfLayout::kInMemory;
}

// Buffers that older versions saved and that the configuration determines.
bool is_known_buffer(const std::string& name) {
  std::string head;
  return split_tail(name, "rotary_emb.inv_freq", head);
}

void check_piece(const TensorFolder::Place& place, const HfPiece& piece) {
  if (!(place.entry->shape == piece.shape)) {
    throw user_error("{}: tensor {} is {}, config.json makes it {}", place.file->name(), quote(piece.name),
                     place.entry->shape.str(), piece.shape.str());
  }
  if (!is_float_type(place.entry->dtype)) {
    throw user_error("{}: tensor {} is {}; weights are F32, BF16 or F16", place.file->name(),
                     quote(piece.name), dtype_name(place.entry->dtype));
  }
}

}  // namespace

std::string_view hf_layout_name(HfLayout layout) {
  return layout == HfLayout::kHub ? "block_sparse_moe" : "mlp";
}

std::vector<HfPiece> hf_pieces(const ParameterList& parameters, HfLayout layout, std::string_view prefix) {
  std::vector<HfPiece> pieces;
  for (const auto& spec : parameters.specs()) {
    std::string name = spec.name;
    if (name.compare(0, kModelPrefix.size(), kModelPrefix) == 0) {
      name = std::string(prefix) + name.substr(kModelPrefix.size());
    }
    std::string layer;
    if (layout == HfLayout::kHub && (split_tail(name, kGateUp, layer) || split_tail(name, kDown, layer))) {
      add_hub_experts(spec, layer, pieces);
    } else if (layout == HfLayout::kHub && split_tail(name, kGate, layer)) {
      pieces.push_back({layer + "block_sparse_moe.gate.weight", spec.shape, spec.offset});
    } else {
      pieces.push_back({std::move(name), spec.shape, spec.offset});
    }
  }
  return pieces;
}

HfMatch match_hf_tensors(const TensorFolder& folder, const ModelConfig& config,
                         const ParameterList& parameters) {
  HfMatch match;
  match.layout = find_layout(folder);
  const bool bare = !folder.find(std::string(kModelPrefix) + kEmbedding) && folder.find(kEmbedding);
  const std::string prefix(bare ? std::string_view() : kModelPrefix);
  if (bare)
    match.notes.push_back(folder.origin() + ": tensors are named as the bare MixtralModel saves them");

  std::map<std::string, TensorFolder::Place> left = folder.tensors();
  std::vector<std::string> missing;
  for (auto& piece : hf_pieces(parameters, match.layout, prefix)) {
    auto found = left.find(piece.name);
    if (found == left.end() && config.tie_word_embeddings && piece.name == prefix + kEmbedding) {
      found = left.find(kHead);  // one matrix under its other name
      if (found != left.end())
        match.notes.push_back(folder.origin() + ": the tied embedding is read from lm_head.weight");
    }
    if (found == left.end()) {
      missing.push_back(piece.name);
      continue;
    }
    check_piece(found->second, piece);
    match.sources.push_back({std::move(piece), found->second});
    left.erase(found);
  }
  if (!missing.empty()) {
    throw user_error("{}: {} tensors that config.json asks for are missing: {}", folder.origin(),
                     missing.size(), list_names(missing));
  }
  if (const auto head = left.find(kHead); head != left.end() && config.tie_word_embeddings) {
    check_piece(head->second, {kHead, {config.vocab_size, config.hidden_size}, 0});
    match.tied_head = head->second;
    left.erase(head);
  }
  std::vector<std::string> surplus;
  for (const auto& [name, place] : left) {
    if (is_known_buffer(name)) {
      match.notes.push_back(
          fmt::format("{}: {} is computed from config.json, not read", folder.origin(), quote(name)));
    } else {
      surplus.push_back(name);
    }
  }
  if (!surplus.empty()) {
    throw user_error("{}: {} tensors have no place in the model that config.json describes: {}",
                     folder.origin(), surplus.size(), list_names(surplus));
  }
  return match;
}

}  // namespace biomoe
