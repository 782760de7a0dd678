#include "biomoe/model/model_config.h"

#include <algorithm>
#include <cmath>

#include "biomoe/core/error.h"

namespace biomoe {

void ModelConfig::validate() const {
  struct Bound {
    const char* key;
    int64_t value;
    int64_t low, high;
  };
  // The upper bounds keep every product of two of them inside 64 bits.
  const Bound bounds[] = {
      {"vocab_size", vocab_size, 2, 1 << 24},
      {"hidden_size", hidden_size, 1, 1 << 20},
      {"intermediate_size", intermediate_size, 1, 1 << 20},
      {"num_hidden_layers", num_hidden_layers, 1, 4096},
      {"num_attention_heads", num_attention_heads, 1, 4096},
      {"num_key_value_heads", num_key_value_heads, 1, 4096},
      {"num_local_experts", num_local_experts, 1, 4096},
      {"num_experts_per_tok", num_experts_per_tok, 1, 64},
      {"max_position_embeddings", max_position_embeddings, 1, int64_t{1} << 31},
  };
  for (const auto& bound : bounds) {
    if (bound.value < bound.low || bound.value > bound.high) {
      throw user_error("model: {}={} is outside [{}, {}]", bound.key, bound.value, bound.low, bound.high);
    }
  }
  if (head_dim && (*head_dim < 2 || *head_dim > 4096)) {
    throw user_error("model: head_dim={} is outside [2, 4096]", *head_dim);
  }
  if (!head_dim && hidden_size % num_attention_heads != 0) {
    throw user_error("model: hidden_size={} does not divide by num_attention_heads={}; set head_dim",
                     hidden_size, num_attention_heads);
  }
  if (key_width() % 2 != 0)
    throw user_error("model: the head width {} is odd; rotary embedding needs pairs", key_width());
  if (num_attention_heads % num_key_value_heads != 0) {
    throw user_error("model: num_attention_heads={} does not divide by num_key_value_heads={}",
                     num_attention_heads, num_key_value_heads);
  }
  if (num_experts_per_tok > num_local_experts) {
    throw user_error("model: num_experts_per_tok={} is more than num_local_experts={}", num_experts_per_tok,
                     num_local_experts);
  }
  if (!layer_precision.empty() && static_cast<int64_t>(layer_precision.size()) != num_hidden_layers) {
    throw user_error("model: layer_precision has {} entries for num_hidden_layers={}", layer_precision.size(),
                     num_hidden_layers);
  }
  for (const std::string& precision : layer_precision) {
    if (std::find(kLayerPrecisions.begin(), kLayerPrecisions.end(), precision) == kLayerPrecisions.end()) {
      throw user_error("model: layer_precision has an entry {}, expected {} or {}", precision,
                       kLayerPrecisions[0], kLayerPrecisions[1]);
    }
  }
  constexpr int64_t kWidestWindow = int64_t{1} << 31;
  if (sliding_window && (*sliding_window < 1 || *sliding_window > kWidestWindow))
    throw user_error("model: sliding_window={} is outside [1, {}]", *sliding_window, kWidestWindow);
  struct Real {
    const char* key;
    double value;
    bool zero_allowed;
    double high;  // far above any use; beyond, it is a slip
  };
  const Real reals[] = {{"rms_norm_eps", rms_norm_eps, false, 1},
                        {"rope_theta", rope_theta, false, 1e15},
                        {"router_aux_loss_coef", router_aux_loss_coef, true, 1e6},
                        {"router_z_loss_coef", router_z_loss_coef, true, 1e6},
                        {"initializer_range", initializer_range, true, 100}};
  for (const auto& real : reals) {
    if (!std::isfinite(real.value) || real.value < 0 || (real.value == 0 && !real.zero_allowed)) {
      throw user_error("model: {}={} is not a {} number", real.key, real.value,
                       real.zero_allowed ? "finite non-negative" : "finite positive");
    }
    if (real.value > real.high)
      throw user_error("model: {}={} is above {}; set a usual value", real.key, real.value, real.high);
  }
}

}  // namespace biomoe
