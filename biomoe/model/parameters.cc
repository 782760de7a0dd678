#include "biomoe/model/parameters.h"

#include <fmt/format.h>

namespace biomoe {
namespace {

constexpr int64_t kAlignElements = 64;  // 128 bytes of bf16

}  // namespace

ParameterList::ParameterList(const ModelConfig& c)
    : experts_(c.num_local_experts), top_k_(c.num_experts_per_tok) {
  const int64_t D = c.hidden_size, F = c.intermediate_size, E = c.num_local_experts, K = c.key_width();
  const int64_t H = c.num_attention_heads, G = c.num_key_value_heads, V = c.vocab_size;
  bool aligned = true;  // k_proj and v_proj follow q_proj with no gap, so that the three read as one matrix
  auto add = [&](std::string name, Shape shape, ParamKind kind, int64_t layer) {
    if (aligned) arena_elements_ = (arena_elements_ + kAlignElements - 1) / kAlignElements * kAlignElements;
    specs_.push_back({std::move(name), shape, kind, layer, arena_elements_});
    arena_elements_ += shape.num_elements();
  };
  add("model.embed_tokens.weight", {V, D}, ParamKind::kEmbedding, -1);
  for (int64_t layer = 0; layer < c.num_hidden_layers; ++layer) {
    auto in_layer = [&](const char* name, Shape shape, ParamKind kind) {
      add(fmt::format("model.layers.{}.{}", layer, name), shape, kind, layer);
    };
    in_layer("input_layernorm.weight", {D}, ParamKind::kNorm);
    in_layer("self_attn.q_proj.weight", {H * K, D}, ParamKind::kAttention);
    aligned = false;
    in_layer("self_attn.k_proj.weight", {G * K, D}, ParamKind::kAttention);
    in_layer("self_attn.v_proj.weight", {G * K, D}, ParamKind::kAttention);
    aligned = true;
    in_layer("self_attn.o_proj.weight", {D, H * K}, ParamKind::kAttention);
    in_layer("post_attention_layernorm.weight", {D}, ParamKind::kNorm);
    in_layer("mlp.gate.weight", {E, D}, ParamKind::kRouter);
    in_layer("mlp.experts.gate_up_proj", {E, 2 * F, D}, ParamKind::kExpert);
    in_layer("mlp.experts.down_proj", {E, D, F}, ParamKind::kExpert);
  }
  add("model.norm.weight", {D}, ParamKind::kNorm, -1);
  if (!c.tie_word_embeddings) add("lm_head.weight", {V, D}, ParamKind::kHead, -1);
  arena_elements_ = (arena_elements_ + kAlignElements - 1) / kAlignElements * kAlignElements;
}

int64_t ParameterList::num_parameters() const {
  int64_t total = 0;
  for (const auto& spec : specs_) total += spec.num_elements();
  return total;
}

int64_t ParameterList::num_active_parameters() const {
  int64_t total = 0;
  for (const auto& spec : specs_) {
    total += spec.kind == ParamKind::kExpert ? spec.num_elements() / experts_ * top_k_ : spec.num_elements();
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
