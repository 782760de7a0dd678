#include "biomoe/model/parameters.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

namespace biomoe {
namespace {

constexpr int64_t kAlignElements = 64;  // 128 bytes of bf16

}  // namespace

ParameterList::ParameterList(const ModelConfig& c, const MeshPlace& place)
    : experts_(c.num_local_experts), top_k_(c.num_experts_per_tok) {
  const int64_t ep = place.size.ep, held = c.num_local_experts / ep;
  BM_CHECK(held * ep == c.num_local_experts, "{} experts for {} ranks", c.num_local_experts, ep);
  const int64_t D = c.hidden_size, F = c.intermediate_size, E = c.num_local_experts, K = c.key_width();
  const int64_t H = c.num_attention_heads, G = c.num_key_value_heads, V = c.vocab_size;
  auto add = [&](std::string name, Shape shape, ParamKind kind, int64_t layer) {
    specs_.push_back({std::move(name), shape, kind, layer, 0, 0});
  };
  add("model.embed_tokens.weight", {V, D}, ParamKind::kEmbedding, -1);
  for (int64_t layer = 0; layer < c.num_hidden_layers; ++layer) {
    auto in_layer = [&](const char* name, Shape shape, ParamKind kind) {
      add(fmt::format("model.layers.{}.{}", layer, name), shape, kind, layer);
    };
    in_layer("input_layernorm.weight", {D}, ParamKind::kNorm);
    in_layer("self_attn.q_proj.weight", {H * K, D}, ParamKind::kAttention);
    in_layer("self_attn.k_proj.weight", {G * K, D}, ParamKind::kAttention);
    in_layer("self_attn.v_proj.weight", {G * K, D}, ParamKind::kAttention);
    in_layer("self_attn.o_proj.weight", {D, H * K}, ParamKind::kAttention);
    in_layer("post_attention_layernorm.weight", {D}, ParamKind::kNorm);
    in_layer("mlp.gate.weight", {E, D}, ParamKind::kRouter);
    in_layer("mlp.experts.gate_up_proj", {held, 2 * F, D}, ParamKind::kExpert);
    in_layer("mlp.experts.down_proj", {held, D, F}, ParamKind::kExpert);
  }
  add("model.norm.weight", {D}, ParamKind::kNorm, -1);
  if (!c.tie_word_embeddings) add("lm_head.weight", {V, D}, ParamKind::kHead, -1);
  for (ParamSpec& spec : specs_) {
    if (spec.kind != ParamKind::kExpert) continue;
    spec.first = place.ep_rank * held;
    spec.parts = ep;
  }
  num_stages_ = dense_stage(c.num_hidden_layers) + 1;
  const ArenaRegion dense{.copy = place.rank(), .copies = place.size.world()};
  const ArenaRegion experts{.copy = place.dp_rank, .copies = place.size.dp, .experts = true};
  for (int64_t stage = 0; stage < num_stages_; ++stage) {
    ArenaRegion region = stage > 0 && stage % 2 == 0 ? experts : dense;
    region.stage = stage;
    lay_out(region);
  }
  shards_ = place.shards && place.size.world() > 1;
  hold();
}

// Places in the model's arenas.
void ParameterList::hold() {
  int64_t owned = 0;
  for (ArenaRegion& region : regions_) {
    region.held = region.begin;
    region.own = shards_ ? owned : region.owned_begin();
    owned += region.owned_count();
  }
  held_elements_ = shards_ ? owned : arena_elements_;
  // Rooms of dense regions and of experts', for even layers and odd ones, where -1 is none yet. Layers are
  // alike, and so are the regions that take turns in one.
  std::array<int64_t, 4> rooms{-1, -1, -1, -1};
  for (ArenaRegion& region : regions_) {
    if (!shards_) break;
    if (region.copies == 1) {
      region.held = region.own;
      continue;
    }
    const bool of_layer = region.stage > 0 && region.stage + 1 < num_stages_;
    int64_t room = of_layer ? rooms[static_cast<size_t>((region.stage - 1) % 4)] : -1;
    if (room < 0) {
      room = held_elements_;
      held_elements_ += region.count;
    }
    if (of_layer) rooms[static_cast<size_t>((region.stage - 1) % 4)] = room;
    region.held = room;
  }
  for (ParamSpec& spec : specs_) {
    const ArenaRegion& own = region(stage_of(spec));
    spec.held = own.held + spec.offset - own.begin;
  }
}

int64_t ParameterList::stage_of(const ParamSpec& spec) const {
  if (spec.kind == ParamKind::kExpert) return experts_stage(spec.layer);
  if (spec.layer >= 0) return dense_stage(spec.layer);
  return spec.kind == ParamKind::kEmbedding ? 0 : num_stages_ - 1;
}

// Gives places to the parameters of a region.
void ParameterList::lay_out(ArenaRegion region) {
  const auto align = [this](int64_t to) { arena_elements_ = (arena_elements_ + to - 1) / to * to; };
  region.begin = arena_elements_;
  for (ParamSpec& spec : specs_) {
    if (stage_of(spec) != region.stage) continue;
    // k_proj and v_proj follow q_proj with no gap, so that the three read as one matrix.
    const bool follows = spec.name.ends_with("k_proj.weight") || spec.name.ends_with("v_proj.weight");
    if (!follows) align(kAlignElements);
    spec.offset = arena_elements_;
    arena_elements_ += spec.num_elements();
  }
  const int64_t unit = kAlignElements * region.copies;
  region.count = (arena_elements_ - region.begin + unit - 1) / unit * unit;
  arena_elements_ = region.begin + region.count;
  regions_.push_back(region);
}

Shape ParamSpec::whole_shape() const {
  Shape whole;
  for (int axis = 0; axis < shape.rank(); ++axis) whole.push_back(axis == 0 ? shape[0] * parts : shape[axis]);
  return whole;
}

StateOwners ParameterList::state_owners(const ParamSpec& spec) const {
  StateOwners owners;
  int64_t state = 0;  // of the first element that a rank owns of the region
  for (const ArenaRegion& region : regions_) {
    if (spec.offset < region.begin || spec.offset >= region.begin + region.count) {
      state += region.owned_count();
      continue;
    }
    owners.copy = region.copy;
    owners.experts = region.experts;
    for (int64_t copy = 0; copy < region.copies; ++copy) {
      const int64_t first = region.begin + copy * region.owned_count() - spec.offset;
      const int64_t begin = std::clamp<int64_t>(first, 0, spec.num_elements());
      const int64_t end = std::clamp<int64_t>(first + region.owned_count(), begin, spec.num_elements());
      owners.stretches.push_back({begin, end - begin, state + begin - first});
    }
    return owners;
  }
  throw failure("{} is in no region of the arenas", spec.name);
}

int64_t ParameterList::owned_elements() const {
  int64_t total = 0;
  for (const ArenaRegion& region : regions_) total += region.owned_count();
  return total;
}

int64_t ParameterList::num_parameters() const {
  int64_t total = 0;
  for (const auto& spec : specs_) total += spec.num_elements() * spec.parts;
  return total;
}

int64_t ParameterList::num_active_parameters() const {
  int64_t total = 0;
  for (const auto& spec : specs_) {
    total += spec.kind == ParamKind::kExpert ? spec.num_elements() * spec.parts / experts_ * top_k_
                                             : spec.num_elements();
  }
  return total;
}

const ParamSpec& ParameterList::find(std::string_view name) const {
  for (const auto& spec : specs_) {
    if (spec.name == name) return spec;
  }
  throw failure("the model has no parameter named {}", name);
}

}  // namespace biomoe
