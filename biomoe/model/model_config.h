// The shape of a Mixtral model, with the names that `transformers` gives in config.json.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace biomoe {

// bf16 stands for what the device computes in without fp8_config: fp32 on the CPU.
inline constexpr std::array<std::string_view, 2> kLayerPrecisions{"fp8", "bf16"};

// What the load-balancing loss evens out: tokens of all layers together, or of each layer (see BalanceOver).
enum class AuxLossType : uint8_t { kHf, kPerLayer };
inline constexpr std::array<std::string_view, 2> kAuxLossTypeNames{"hf", "per_layer"};

struct ModelConfig {
  int64_t vocab_size = 0;           // V; 0: taken from the vocabulary
  int64_t hidden_size = 256;        // D
  int64_t intermediate_size = 512;  // F, of one expert
  int64_t num_hidden_layers = 4;    // L
  int64_t num_attention_heads = 4;  // H
  int64_t num_key_value_heads = 2;  // G, divides H
  std::optional<int64_t> head_dim;  // K, even; default D / H
  int64_t num_local_experts = 8;    // E
  int64_t num_experts_per_tok = 2;  // k <= E
  int64_t max_position_embeddings = 4096;
  std::optional<int64_t> sliding_window;  // a token sees itself and the window - 1 tokens before it
  double rms_norm_eps = 1e-5;
  double rope_theta = 1e6;
  bool tie_word_embeddings = false;
  double router_aux_loss_coef = 0.02;
  AuxLossType router_aux_loss_type = AuxLossType::kHf;
  double router_z_loss_coef = 0.0;
  double initializer_range = 0.02;
  std::vector<std::string> layer_precision;  // kLayerPrecisions of each layer; empty: the same for all

  int64_t key_width() const { return head_dim ? *head_dim : hidden_size / num_attention_heads; }
  int64_t qkv_width() const { return (num_attention_heads + 2 * num_key_value_heads) * key_width(); }

  // Throws user_error naming the key that is out of range or does not fit another.
  void validate() const;

  template <typename Visitor>
  void visit(Visitor& v) {
    v.field("vocab_size", vocab_size, "entries of the vocabulary; 0: the vocabulary's own size");
    v.field("hidden_size", hidden_size, "model width D");
    v.field("intermediate_size", intermediate_size, "width F of one expert");
    v.field("num_hidden_layers", num_hidden_layers, "layers");
    v.field("num_attention_heads", num_attention_heads, "query heads H");
    v.field("num_key_value_heads", num_key_value_heads, "key/value heads G, divides H");
    v.field("head_dim", head_dim, "head width K; default hidden_size / num_attention_heads");
    v.field("num_local_experts", num_local_experts, "experts E");
    v.field("num_experts_per_tok", num_experts_per_tok, "experts k that a token goes to");
    v.field("max_position_embeddings", max_position_embeddings, "longest sequence");
    v.field("sliding_window", sliding_window, "attention window in tokens; null: full causal attention");
    v.field("rms_norm_eps", rms_norm_eps, "epsilon of RMSNorm");
    v.field("rope_theta", rope_theta, "base of the rotary embedding");
    v.field("tie_word_embeddings", tie_word_embeddings, "head and embedding share one matrix");
    v.field("router_aux_loss_coef", router_aux_loss_coef, "coefficient of the load-balancing loss");
    v.choice("router_aux_loss_type", router_aux_loss_type, kAuxLossTypeNames,
             "loads of experts are to be even over all layers together, as transformers has it, or in each");
    v.field("router_z_loss_coef", router_z_loss_coef, "coefficient of the router z-loss");
    v.field("initializer_range", initializer_range, "standard deviation of initial weights");
    v.field("layer_precision", layer_precision,
            "for each layer fp8 or bf16, where fp8_config.enabled; empty: fp8 in all layers");
  }
};

}  // namespace biomoe
