#include "biomoe/train/evaluation.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numbers>

namespace biomoe {

std::optional<double> Evaluation::nats_per_base() const {
  if (bases == 0) return std::nullopt;
  return nats / static_cast<double>(bases);
}

nlohmann::json score_json(int64_t bases, double nats) {
  if (bases == 0)
    return {{"bases", 0}, {"nats_per_base", nullptr}, {"bits_per_base", nullptr}, {"perplexity", nullptr}};
  const double per_base = nats / static_cast<double>(bases);
  return {{"bases", bases},
          {"nats_per_base", per_base},
          {"bits_per_base", per_base / std::numbers::ln2},
          {"perplexity", std::exp(per_base)}};
}

std::string score_text(const Evaluation& evaluation) {
  const auto nats = evaluation.nats_per_base();
  if (!nats) return "nothing was scored: all of it is masked, or unknown to the vocabulary";
  return fmt::format("{:.4f} nats/base, {:.4f} bits/base", *nats, *nats / std::numbers::ln2);
}

Evaluation evaluate(Model& model, std::shared_ptr<const SequencePart> part, const Vocabulary& vocabulary,
                    const LoaderOptions& loader_options, const EvaluationOptions& options) {
  Loader loader(std::move(part), vocabulary, loader_options);
  Batch batch;
  std::vector<SequenceSource> sources;
  std::map<int64_t, RecordScore> scores;
  Evaluation evaluation;
  for (int64_t n = 0; options.max_batches == 0 || n < options.max_batches; ++n) {
    if (!loader.next(batch, &sources)) break;
    const DeviceBatch& on_device = model.upload(batch);
    model.forward(on_device, false);
    model.loss(on_device, false);
    const TensorView nll_T = model.nll_sync();
    const float* nll = nll_T.f32();
    if (!std::all_of(nll, nll + batch.num_tokens(), [](float value) { return std::isfinite(value); })) {
      const std::string place = model.first_nonfinite_sync();
      throw failure("evaluation: the loss is not finite; the first value that is not is in {}",
                    place.empty() ? "the head" : place);
    }
    for (size_t b = 0; b < sources.size(); ++b) {
      RecordScore score{sources[b].record, 0, 0.0};
      for (auto t = static_cast<size_t>(batch.cu_seqlens[b]);
           t < static_cast<size_t>(batch.cu_seqlens[b + 1]); ++t) {
        if (batch.loss_weights[t] == 0.0f || !vocabulary.is_base(batch.targets[t])) continue;
        score.nats += static_cast<double>(nll[t]);
        ++score.bases;
      }
      RecordScore& total = scores[score.record];
      total.record = score.record;
      total.bases += score.bases;
      total.nats += score.nats;
      evaluation.bases += score.bases;
      evaluation.nats += score.nats;
    }
    if (options.progress) options.progress(evaluation.bases);
  }
  for (const auto& [record, score] : scores) {
    if (score.bases > 0) evaluation.records.push_back(score);
  }
  return evaluation;
}

}  // namespace biomoe
