// Held-out loss: forward only, each base scored once, no auxiliary losses.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "biomoe/data/dataset.h"
#include "biomoe/model/model.h"

namespace biomoe {

struct RecordScore {
  int64_t record = 0;
  int64_t bases = 0;  // scored: not degenerate, not EOS
  double nats = 0;
};

struct Evaluation {
  static constexpr uint64_t kBytesARecord = 128;  // while it is scored: a node of a map, and its RecordScore
  int64_t bases = 0;
  double nats = 0;
  std::vector<RecordScore> records;             // in file order, records without a scored base left out
  std::optional<double> nats_per_base() const;  // nothing where nothing was scored
};

// {"bases", "nats_per_base", "bits_per_base", "perplexity"} of `bases` scored bases with `nats` in all; the
// last three are null where nothing was scored.
nlohmann::json score_json(int64_t bases, double nats);

// "1.2345 nats/base, 1.7810 bits/base", or that nothing was scored.
std::string score_text(const Evaluation& evaluation);

struct EvaluationOptions {
  int64_t max_batches = 0;  // 0: all
  std::function<void(int64_t bases)> progress;
};

// Leaves the model's weights, gradients and routing statistics as they are. Throws failure for a loss that is
// not finite.
Evaluation evaluate(Model& model, std::shared_ptr<const SequencePart> part, const Vocabulary& vocabulary,
                    const LoaderOptions& loader, const EvaluationOptions& options = {});

}  // namespace biomoe
