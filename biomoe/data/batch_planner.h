// BatchPlanner: which windows make up each micro-batch, for every rank, without touching a base.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "biomoe/core/rng.h"
#include "biomoe/data/permutation.h"
#include "biomoe/data/windows.h"

namespace biomoe {

// Where the global sequence of micro-batches stands; the same on all ranks after the same number of steps, so
// a checkpoint needs one, and another number of ranks can go on from it.
struct LoaderPosition {
  int64_t sample = 0;       // windows consumed since the start; epoch = sample / windows of an epoch
  int64_t micro_batch = 0;  // global micro-batches consumed since the start
  bool operator==(const LoaderPosition&) const = default;
};

struct PlanOptions {
  int64_t token_micro_batch_size = 4096;
  uint64_t seed = 0;
  bool shuffle = true;
  bool repeat = true;
  int64_t rank = 0;
  int64_t world = 1;
  double reverse_complement_prob = 0.0;
};

// A window as it will be read. On the other strand, BOS comes before the complement of a record's last base
// when the window has room for it, and the base before the window is what its last input predicts.
struct PlannedSequence {
  int64_t record = 0;
  int64_t begin = 0;   // first base on the forward strand
  int64_t length = 0;  // bases
  int64_t window = 0;  // number in the WindowIndex
  bool reversed = false;
  bool bos = false;         // the first input is BOS
  bool next_base = false;   // the last input predicts one more base
  bool eos_target = false;  // the last input predicts EOS
  int64_t overlap = 0;      // leading inputs that the window before holds too
  int64_t n_run_skipped = 0;
  int64_t num_tokens() const { return length + (bos ? 1 : 0); }
};

// The global sequence: windows in the order of the epoch's permutation, epoch after epoch, packed greedily
// into micro-batches of at most token_micro_batch_size tokens. Micro-batch i belongs to rank i % world. It
// depends on nothing but the index, the seed and the sizes.
class BatchPlanner {
 public:
  // `windows` must outlive the planner. Throws user_error when there is no window, when one may exceed a
  // micro-batch, and for a reverse complement of windows of one token, where BOS takes the place of a base.
  BatchPlanner(const WindowIndex& windows, const PlanOptions& options);

  void seek(const LoaderPosition& position) { position_ = position; }
  const LoaderPosition& position() const { return position_; }

  // Sequences of a micro-batch at most; what plan_round needs room for.
  int64_t max_sequences() const;

  // Plans the next `world` micro-batches and puts this rank's into `out`. False when nothing is left. In the
  // last round of a run without repeat a rank may get no sequence at all while others do.
  bool plan_round(std::vector<PlannedSequence>& out);

 private:
  bool sample_left() const { return options_.repeat || position_.sample < windows_.num_windows(); }
  PlannedSequence sequence(int64_t sample);
  void pack(std::vector<PlannedSequence>* out);

  const WindowIndex& windows_;
  PlanOptions options_;
  LoaderPosition position_;
  Rng strand_rng_;
  int64_t epoch_ = -1;
  Permutation order_{0, 0, 0};
};

}  // namespace biomoe
