// What the tests of the model share: a small configuration, batches, and one pass with its results copied
// out.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "biomoe/core/rng.h"
#include "biomoe/model/model.h"

namespace biomoe::test {

// Odd sizes on purpose; initializer_range is large enough for every part to matter in the loss.
inline ModelConfig small_config() {
  ModelConfig config;
  config.vocab_size = 11;
  config.hidden_size = 24;
  config.intermediate_size = 20;
  config.num_hidden_layers = 3;
  config.num_attention_heads = 4;
  config.num_key_value_heads = 2;
  config.head_dim = 10;
  config.num_local_experts = 5;
  config.num_experts_per_tok = 2;
  config.router_aux_loss_coef = 0.3;
  config.router_z_loss_coef = 0.05;
  config.initializer_range = 0.3;
  return config;
}

inline ModelLimits small_limits(int64_t max_tokens = 640, int64_t max_seqlen = 512) {
  ModelLimits limits;
  limits.max_tokens = max_tokens;
  limits.max_seqlen = max_seqlen;
  return limits;
}

// Random sequences of these lengths; the last token of each has no target. Sequence b depends on (seed, b)
// and its length alone.
inline Batch random_batch(const ModelConfig& config, const std::vector<int64_t>& lengths, uint64_t seed) {
  Batch batch;
  for (size_t b = 0; b < lengths.size(); ++b) {
    const Rng rng(seed, RngStream::kTest, static_cast<uint32_t>(b));
    auto token = [&](int64_t i) {
      return static_cast<int32_t>(rng.u64(static_cast<uint64_t>(i)) %
                                  static_cast<uint64_t>(config.vocab_size));
    };
    for (int64_t i = 0; i < lengths[b]; ++i) {
      const bool last = i + 1 == lengths[b];
      batch.tokens.push_back(token(i));
      batch.targets.push_back(last ? kIgnoreTarget : token(i + 1));
      batch.loss_weights.push_back(last ? 0.0f : 1.0f);
      batch.positions.push_back(static_cast<int32_t>(i));
      if (!last) ++batch.valid_targets;
    }
    batch.cu_seqlens.push_back(static_cast<int32_t>(batch.tokens.size()));
  }
  batch.target_weight = static_cast<double>(batch.valid_targets);
  return batch;
}

// Drops the targets of tokens [begin, end).
inline void ignore_targets(Batch& batch, int64_t begin, int64_t end) {
  for (auto t = static_cast<size_t>(begin); t < static_cast<size_t>(end); ++t) {
    if (batch.loss_weights[t] == 0.0f) continue;
    batch.target_weight -= static_cast<double>(batch.loss_weights[t]);
    batch.targets[t] = kIgnoreTarget;
    batch.loss_weights[t] = 0.0f;
    --batch.valid_targets;
  }
}

// One sequence of a batch as a batch of its own.
inline Batch sequence_of(const Batch& batch, int64_t b) {
  const int32_t begin = batch.cu_seqlens[static_cast<size_t>(b)];
  const int32_t end = batch.cu_seqlens[static_cast<size_t>(b) + 1];
  auto part = [&](const auto& values) {
    return std::decay_t<decltype(values)>(values.begin() + begin, values.begin() + end);
  };
  Batch one;
  one.tokens = part(batch.tokens);
  one.targets = part(batch.targets);
  one.loss_weights = part(batch.loss_weights);
  one.positions = part(batch.positions);
  one.cu_seqlens = {0, end - begin};
  for (const float weight : one.loss_weights) {
    one.valid_targets += weight > 0.0f ? 1 : 0;
    one.target_weight += static_cast<double>(weight);
  }
  return one;
}

inline std::vector<float> values_of(const TensorView& view) {
  return std::vector<float>(view.f32(), view.f32() + view.num_elements());
}

inline std::vector<float> logits_of(Model& model, const Batch& batch) {
  std::vector<float> values(static_cast<size_t>(batch.num_tokens() * model.config().vocab_size));
  model.forward(model.upload(batch), false);
  model.logits_sync(TensorView(values.data(), DType::kF32, {batch.num_tokens(), model.config().vocab_size}));
  return values;
}

// Parameters' gradients without the gaps between them.
inline std::vector<float> gradients_of(const Model& model) {
  std::vector<float> values;
  for (const auto& spec : model.parameters().specs()) {
    const std::vector<float> one = values_of(model.gradient(spec));
    values.insert(values.end(), one.begin(), one.end());
  }
  return values;
}

struct PassResult {
  double lm_loss = 0, aux_loss = 0, z_loss = 0;
  std::vector<float> gradients;
};

// A whole update's passes over the micro-batches, as training does them: with poisoned activations.
// count_ahead: the routers run over all micro-batches first, as they must for more than one.
inline PassResult accumulate(Model& model, const std::vector<Batch>& batches, bool count_ahead = true) {
  double weight = 0;
  for (const Batch& batch : batches) weight += batch.target_weight;
  const double scale = weight > 0 ? 1.0 / weight : 0.0;
  const ModelConfig& config = model.config();
  model.start_step(scale);
  model.reset_sums();
  for (size_t i = 0; count_ahead && i < batches.size(); ++i) {
    model.poison_activations();
    model.count_routing(model.upload(batches[i]));
  }
  for (size_t i = 0; i < batches.size(); ++i) {
    model.poison_activations();
    const DeviceBatch& batch = model.upload(batches[i]);
    model.forward(batch, !count_ahead);
    model.loss(batch, true, i > 0);
    model.backward(batch, config.router_aux_loss_coef, config.router_z_loss_coef, i > 0);
  }
  model.finish_step(config.router_aux_loss_coef);
  const StepSums sums = model.sums();
  return {.lm_loss = sums.loss.weighted_nll * scale,
          .aux_loss = sums.balance_loss,
          .z_loss = sums.z_loss,
          .gradients = gradients_of(model)};
}

// The sums of one batch without gradients.
inline StepSums evaluate_sums(Model& model, const Batch& batch) {
  model.start_step(0.0);
  model.reset_sums();
  model.forward(model.upload(batch));
  model.loss(model.upload(batch), false);
  model.finish_step(0.0);
  return model.sums();
}

// |a - b| / |b| in the Euclidean norm; infinity for different sizes or a value that is not a number.
inline double norm_error(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return INFINITY;
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!std::isfinite(a[i]) || !std::isfinite(b[i])) return INFINITY;
    const double d = static_cast<double>(a[i]) - static_cast<double>(b[i]);
    difference += d * d;
    norm += static_cast<double>(b[i]) * static_cast<double>(b[i]);
  }
  return difference == 0 ? 0.0 : std::sqrt(difference / norm);
}

// norm_error of each parameter's gradient, the largest.
inline double worst_parameter_error(const Model& model, const std::vector<float>& a,
                                    const std::vector<float>& b) {
  if (a.size() != b.size()) return INFINITY;
  double worst = 0;
  auto begin = static_cast<std::ptrdiff_t>(0);
  for (const auto& spec : model.parameters().specs()) {
    const auto end = begin + static_cast<std::ptrdiff_t>(spec.num_elements());
    worst = std::max(worst,
                     norm_error({a.begin() + begin, a.begin() + end}, {b.begin() + begin, b.begin() + end}));
    begin = end;
  }
  return worst;
}

inline bool all_finite(const std::vector<float>& values) {
  return std::all_of(values.begin(), values.end(), [](float value) { return std::isfinite(value); });
}

}  // namespace biomoe::test
