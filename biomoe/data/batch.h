// Batch: one micro-batch of packed (THD) sequences, as the loader makes it and the model reads it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace biomoe {

inline constexpr int32_t kIgnoreTarget = -100;  // as torch.nn.CrossEntropyLoss

// Counts of what the policies did, added up over batches and reported in the log.
struct MaskCounts {
  int64_t bases = 0;                 // tokens that stand for a base (no BOS, no EOS)
  int64_t degenerate_masked = 0;     // targets masked from the loss because the base is degenerate
  int64_t soft_masked = 0;           // lower-case bases met
  int64_t n_run_skipped = 0;         // bases of N runs that no window covers
  int64_t reverse_complemented = 0;  // windows read from the other strand
  MaskCounts& operator+=(const MaskCounts& other);
  bool operator==(const MaskCounts&) const = default;
};

// T tokens of B sequences, back to back with no padding: sequence b is [cu_seqlens[b], cu_seqlens[b+1]).
// Vectors keep their capacity when a batch is filled again, so that a step allocates nothing.
struct Batch {
  std::vector<int32_t> tokens;         // [T] ids in [0, V)
  std::vector<int32_t> targets;        // [T] the id that follows in the record, or kIgnoreTarget
  std::vector<float> loss_weights;     // [T] 0 where the target is ignored
  std::vector<int32_t> positions;      // [T] 0.. within each sequence
  std::vector<int32_t> cu_seqlens{0};  // [B + 1], starts with 0, ends with T; {0} for T = 0
  int64_t valid_targets = 0;           // targets with a weight above 0
  double target_weight = 0;  // sum of loss_weights: what the summed loss is divided by, over the global batch
  MaskCounts counts;

  int64_t num_tokens() const { return static_cast<int64_t>(tokens.size()); }
  int64_t num_sequences() const { return static_cast<int64_t>(cu_seqlens.size()) - 1; }
  void clear();                                     // T = 0, capacity kept
  void reserve(int64_t max_tokens);                 // room for max_tokens tokens and as many sequences
  static size_t planned_bytes(int64_t max_tokens);  // what reserve takes
};

}  // namespace biomoe
