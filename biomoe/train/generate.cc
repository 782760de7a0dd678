#include "biomoe/train/generate.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "biomoe/core/rng.h"

namespace biomoe {
namespace {

void check_options(const GenerateOptions& options) {
  if (options.max_new_tokens < 0) throw user_error("max-new-tokens={} is below 0", options.max_new_tokens);
  if (!(std::isfinite(options.temperature) && options.temperature >= 0)) {
    throw user_error("temperature={} must be at least 0", options.temperature);
  }
  if (options.top_k < 0) throw user_error("top-k={} is below 0", options.top_k);
  if (!(options.top_p > 0 && options.top_p <= 1))
    throw user_error("top-p={} is outside (0, 1]", options.top_p);
}

// Index into `logits` (which may hold -inf for what must not be drawn).
int32_t sample(const std::vector<double>& logits, const GenerateOptions& options, double uniform) {
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)];
  });
  if (options.temperature == 0) return order.front();
  if (options.top_k > 0) order.resize(std::min(order.size(), static_cast<size_t>(options.top_k)));
  std::vector<double> probs;
  const double top = logits[static_cast<size_t>(order.front())];
  for (int32_t id : order)
    probs.push_back(std::exp((logits[static_cast<size_t>(id)] - top) / options.temperature));
  const double sum = std::accumulate(probs.begin(), probs.end(), 0.0);
  double kept = 0;
  size_t count = 0;
  while (count < probs.size() && (count == 0 || kept < options.top_p * sum)) kept += probs[count++];
  double left = uniform * kept;
  for (size_t i = 0; i < count; ++i) {
    left -= probs[i];
    if (left < 0) return order[i];
  }
  return order[count - 1];
}

}  // namespace

std::string generate(LoadedModel& loaded, const GenerateOptions& options) {
  check_options(options);
  Model& model = *loaded.model;
  const Vocabulary& vocabulary = loaded.vocabulary;
  std::vector<int32_t> tokens;
  if (loaded.data.add_bos && vocabulary.special().bos) tokens.push_back(*vocabulary.special().bos);
  for (const char symbol : options.prompt) {
    const int32_t id = vocabulary.id(static_cast<uint8_t>(symbol));
    if (id < 0)
      throw user_error("the prompt holds '{}', which the vocabulary {} has no token for", symbol,
                       vocabulary.name());
    tokens.push_back(id);
  }
  if (tokens.empty()) throw user_error("the prompt is empty and the model has no BOS; give --prompt");
  const auto window = static_cast<size_t>(model.limits().max_seqlen);
  if (tokens.size() > window)
    throw user_error("the prompt of {} tokens exceeds the window of {}", tokens.size(), window);
  const int64_t V = model.config().vocab_size;
  Arena arena(window * static_cast<size_t>(V) * sizeof(float) + kArenaAlignment, "logits");
  const Rng rng(options.seed, RngStream::kSample);
  std::string text;
  Batch batch;
  for (int64_t n = 0; n < options.max_new_tokens && tokens.size() <= window; ++n) {
    batch.clear();
    batch.tokens = tokens;
    batch.positions.resize(tokens.size());
    std::iota(batch.positions.begin(), batch.positions.end(), 0);
    batch.cu_seqlens = {0, static_cast<int32_t>(tokens.size())};
    model.forward(model.upload(batch), false);
    arena.release(0);
    const TensorView logits_TV = arena.tensor(DType::kF32, {batch.num_tokens(), V});
    model.logits_sync(logits_TV);
    const float* last = logits_TV.f32() + (batch.num_tokens() - 1) * V;
    std::vector<double> logits(static_cast<size_t>(V), -INFINITY);
    for (int32_t id = 0; id < vocabulary.size(); ++id) {
      const bool eos = vocabulary.special().eos && id == *vocabulary.special().eos;
      if (!std::isfinite(last[id])) throw failure("the model gives logits that are not finite");
      if (eos || vocabulary.is_base(id)) logits[static_cast<size_t>(id)] = static_cast<double>(last[id]);
    }
    const int32_t next = sample(logits, options, rng.uniform(static_cast<uint64_t>(n)));
    if (vocabulary.special().eos && next == *vocabulary.special().eos) break;
    text += vocabulary.text(next);
    tokens.push_back(next);
  }
  return text;
}

}  // namespace biomoe
