#include "biomoe/data/batch.h"

#include <cstddef>

namespace biomoe {

MaskCounts& MaskCounts::operator+=(const MaskCounts& other) {
  bases += other.bases;
  degenerate_masked += other.degenerate_masked;
  soft_masked += other.soft_masked;
  n_run_skipped += other.n_run_skipped;
  reverse_complemented += other.reverse_complemented;
  return *this;
}

void Batch::clear() {
  tokens.clear();
  targets.clear();
  loss_weights.clear();
  positions.clear();
  cu_seqlens.assign(1, 0);
  valid_targets = 0;
  target_weight = 0;
  counts = {};
}

void Batch::reserve(int64_t max_tokens) {
  const auto n = static_cast<size_t>(max_tokens);
  tokens.reserve(n);
  targets.reserve(n);
  loss_weights.reserve(n);
  positions.reserve(n);
  cu_seqlens.reserve(n + 1);
}

size_t Batch::planned_bytes(int64_t max_tokens) {
  const size_t a_token = sizeof(int32_t) * 4 + sizeof(float);  // cu_seqlens as for sequences of one token
  return static_cast<size_t>(max_tokens) * a_token;
}

}  // namespace biomoe
