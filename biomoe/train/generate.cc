#include "biomoe/train/generate.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "biomoe/core/rng.h"
#include "biomoe/data/alphabet.h"
#include "biomoe/model/decoder.h"

namespace biomoe {
namespace {

void check_options(const GenerateOptions& options) {
  if (options.max_new_tokens < 0) throw user_error("max-new-tokens={} is below 0", options.max_new_tokens);
  if (!(std::isfinite(options.temperature) && options.temperature >= 0)) {
    throw user_error("temperature={} must be a finite number of at least 0", options.temperature);
  }
  if (options.top_k < 0) throw user_error("top-k={} is below 0", options.top_k);
  if (!(options.top_p > 0 && options.top_p <= 1))
    throw user_error("top-p={} is outside (0, 1]", options.top_p);
}

// What a prompt may hold: "A C G N T a c g t".
std::string symbols_of(const Vocabulary& vocabulary) {
  std::string symbols;
  for (int c = '!'; c <= '~'; ++c) {
    const int32_t id = vocabulary.id(static_cast<uint8_t>(c));
    if (id >= 0 && !vocabulary.is_special(id))
      symbols += fmt::format("{}{:c}", symbols.empty() ? "" : " ", c);
  }
  return symbols;
}

std::vector<int32_t> prompt_tokens(const LoadedModel& loaded, const std::string& prompt) {
  const Vocabulary& vocabulary = loaded.vocabulary;
  std::vector<int32_t> tokens;
  if (loaded.data.add_bos && vocabulary.special().bos) tokens.push_back(*vocabulary.special().bos);
  for (const char c : prompt) {
    const auto symbol = static_cast<uint8_t>(c);
    const int32_t id = vocabulary.id(symbol);
    // UNK is special too: the model has not learnt to continue it.
    if (id < 0 || vocabulary.is_special(id)) {
      throw user_error("the prompt holds {}, which the vocabulary {} has no token for; it has {}",
                       describe_symbol(symbol), vocabulary.name(), symbols_of(vocabulary));
    }
    tokens.push_back(id);
  }
  if (tokens.empty()) throw user_error("the prompt is empty and the model has no BOS; give --prompt");
  const int64_t window = loaded.model->limits().max_seqlen;
  if (static_cast<int64_t>(tokens.size()) > window) {
    throw user_error("the prompt of {} tokens exceeds the window of {}; shorten it or raise --max-seq-length",
                     tokens.size(), window);
  }
  return tokens;
}

// -inf for what must not be drawn.
std::vector<double> drawable_logits(const Vocabulary& vocabulary, const TensorView& logits_1V) {
  const float* all = logits_1V.f32();
  std::vector<double> logits(static_cast<size_t>(vocabulary.size()), -INFINITY);
  bool any = false;
  for (int32_t id = 0; id < vocabulary.size(); ++id) {
    if (!std::isfinite(all[id])) throw failure("the model gives logits that are not finite");
    if (id != vocabulary.special().eos && !vocabulary.is_base(id)) continue;
    logits[static_cast<size_t>(id)] = static_cast<double>(all[id]);
    any = true;
  }
  if (!any) throw user_error("the vocabulary {} has neither bases nor EOS to generate", vocabulary.name());
  return logits;
}

// Index into `logits`. `uniform` in [0, 1).
int32_t sample(const std::vector<double>& logits, const GenerateOptions& options, double uniform) {
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)];
  });
  if (options.temperature == 0) return order.front();
  if (options.top_k > 0) {
    order.resize(static_cast<size_t>(std::min(static_cast<int64_t>(order.size()), options.top_k)));
  }
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
  // Rounding left a little: the last that can be drawn at all.
  while (count > 1 && probs[count - 1] == 0) --count;
  return order[count - 1];
}

}  // namespace

Generated generate(LoadedModel& loaded, const GenerateOptions& options) {
  check_options(options);
  const Vocabulary& vocabulary = loaded.vocabulary;
  std::vector<int32_t> fresh = prompt_tokens(loaded, options.prompt);
  Decoder decoder(*loaded.model);
  const Rng rng(options.seed, RngStream::kSample);
  Generated result;
  while (result.tokens < options.max_new_tokens) {
    if (static_cast<int64_t>(fresh.size()) > decoder.capacity() - decoder.length()) {
      result.stop = GenerateStop::kWindowFull;
      return result;
    }
    const std::vector<double> logits = drawable_logits(vocabulary, decoder.extend(fresh));
    const int32_t next = sample(logits, options, rng.uniform(static_cast<uint64_t>(result.tokens)));
    if (next == vocabulary.special().eos) {
      result.stop = GenerateStop::kEos;
      return result;
    }
    result.text += vocabulary.text(next);
    ++result.tokens;
    fresh.assign(1, next);
  }
  return result;
}

}  // namespace biomoe
