// Held-out loss: forward only, each base scored once, no auxiliary losses.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
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
  std::vector<RecordScore> records;  // in file order, records without a scored base left out
  double nats_per_base() const { return bases > 0 ? nats / static_cast<double>(bases) : 0.0; }
  double bits_per_base() const;
  double perplexity() const;
};

struct EvaluationOptions {
  int64_t max_batches = 0;  // 0: all
  std::function<void(int64_t bases)> progress;
};

// Leaves the model's weights, gradients and routing statistics as they are. Throws failure for a loss that is
// not finite.
Evaluation evaluate(Model& model, std::shared_ptr<const SequencePart> part, const Vocabulary& vocabulary,
                    const LoaderOptions& loader, const EvaluationOptions& options = {});

}  // namespace biomoe
