// Loader: the stream of micro-batches of one rank, made ahead by worker threads.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "biomoe/data/batch.h"
#include "biomoe/data/batch_assembler.h"
#include "biomoe/data/batch_planner.h"
#include "biomoe/data/sequence_store.h"
#include "biomoe/data/vocabulary.h"

namespace biomoe {

// Sequences and the windows over them: what one loader reads. Immutable once built, shared between loaders.
struct SequencePart {
  std::shared_ptr<const SequenceStore> store;
  WindowIndex windows;
};

struct LoaderOptions {
  PlanOptions plan;
  LossPolicies policies;
  int64_t num_workers = 1;  // 0: next() makes the batch itself
};

// The sequence of batches depends on the part, the plan options and the policies alone: not on num_workers,
// and with `world` ranks, rank r gets the batches r, r + world, ... of the sequence that one rank would get.
// One thread calls the members; the workers are the loader's own.
class Loader {
 public:
  // Throws user_error: an empty part, a window that exceeds a micro-batch, a vocabulary without BOS or EOS.
  Loader(std::shared_ptr<const SequencePart> part, const Vocabulary& vocabulary, const LoaderOptions& options,
         const LoaderPosition& start = {});
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  // Gives the next batch by swapping vectors: pass the same Batch again and nothing is allocated once warm.
  // `sources`, when given, is filled with one entry a packed sequence. False at the end of a run without
  // repeat. All ranks get the same number of batches; in the last round a rank may get one without sequences
  // (T = 0). Rethrows what a worker threw, at the batch where it happened and at every call after it.
  bool next(Batch& batch, std::vector<SequenceSource>* sources = nullptr);

  // Where the stream goes on after the last batch that next() gave.
  const LoaderPosition& position() const { return position_; }
  // Goes on from `position` without reading what came before it. Drops the batches made ahead.
  void seek(const LoaderPosition& position);
  // What the policies did, over all batches given so far.
  const MaskCounts& counts() const { return counts_; }
  // Windows of one pass over the data.
  int64_t windows_per_epoch() const { return part_->windows.num_windows(); }

  // Memory of a loader over `windows`, without the part it reads.
  static size_t planned_bytes(const LoaderOptions& options, const WindowIndex& windows);

 private:
  struct Slot {
    std::vector<PlannedSequence> plan;
    Batch batch;
    LoaderPosition after;
    std::exception_ptr error;
    bool ready = false;
    bool end = false;
  };
  void start_workers();
  void stop_workers();
  void work(std::vector<uint8_t>& scratch);
  void plan_slot(Slot& slot);  // under mutex_
  void fill_slot(Slot& slot, std::vector<uint8_t>& scratch) const;

  std::shared_ptr<const SequencePart> part_;
  LoaderOptions options_;
  BatchPlanner planner_;
  BatchAssembler assembler_;
  LoaderPosition position_;
  MaskCounts counts_;

  std::vector<Slot> slots_;  // a ring: batch number n lives in slot n % size
  std::vector<uint8_t> scratch_;
  std::vector<std::thread> workers_;
  std::mutex mutex_;
  std::condition_variable slot_free_;
  std::condition_variable slot_ready_;
  int64_t planned_ = 0;  // batches planned and given, since the last seek
  int64_t given_ = 0;
  bool all_planned_ = false;
  bool stopping_ = false;
};

}  // namespace biomoe
