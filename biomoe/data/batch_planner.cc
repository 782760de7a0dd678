#include "biomoe/data/batch_planner.h"

#include "biomoe/core/error.h"

namespace biomoe {

BatchPlanner::BatchPlanner(const WindowIndex& windows, const PlanOptions& options)
    : windows_(windows), options_(options), strand_rng_(options.seed, RngStream::kReverseComplement) {
  if (windows.num_windows() == 0) throw user_error("the data set is empty: no record holds a base");
  if (windows.options().max_seq_length > options.token_micro_batch_size)
    throw user_error("token_micro_batch_size={} is below max_seq_length={}: a window would not fit",
                     options.token_micro_batch_size, windows.options().max_seq_length);
  if (options.reverse_complement_prob > 0 && windows.options().max_seq_length < 2)
    throw user_error("reverse_complement_prob={}: needs max_seq_length of at least 2",
                     options.reverse_complement_prob);
  BM_CHECK(options.world >= 1 && options.rank >= 0 && options.rank < options.world, "rank {} of {}",
           options.rank, options.world);
}

int64_t BatchPlanner::max_sequences() const {
  return options_.token_micro_batch_size / windows_.shortest_window();
}

PlannedSequence BatchPlanner::sequence(int64_t sample) {
  const int64_t windows = windows_.num_windows();
  int64_t number = sample % windows;
  if (options_.shuffle) {
    if (const int64_t epoch = sample / windows; epoch != epoch_) {
      order_ = Permutation(windows, options_.seed, static_cast<uint32_t>(epoch));
      epoch_ = epoch;
    }
    number = order_(number);
  }
  const Window w = windows_.window(number);
  PlannedSequence s{.record = w.record, .begin = w.begin, .length = w.length, .window = number};
  s.n_run_skipped = w.n_run_skipped;
  s.reversed = options_.reverse_complement_prob > 0 &&
               strand_rng_.uniform(static_cast<uint64_t>(sample)) < options_.reverse_complement_prob;
  if (s.reversed) {
    const WindowOptions& wanted = windows_.options();
    s.bos = wanted.add_bos && w.at_end && w.length < wanted.max_seq_length;
    s.next_base = w.base_before;
    s.eos_target = wanted.add_eos && w.at_start;
  } else {
    s.bos = w.bos;
    s.next_base = w.base_after;
    s.eos_target = w.eos_target;
    s.overlap = w.overlap;
  }
  return s;
}

void BatchPlanner::pack(std::vector<PlannedSequence>* out) {
  int64_t tokens = 0;
  while (sample_left()) {
    const PlannedSequence next = sequence(position_.sample);
    tokens += next.num_tokens();
    if (tokens > options_.token_micro_batch_size) return;
    ++position_.sample;
    if (out != nullptr) out->push_back(next);
  }
}

bool BatchPlanner::plan_round(std::vector<PlannedSequence>& out) {
  out.clear();
  if (!sample_left()) return false;
  for (int64_t i = 0; i < options_.world; ++i) {
    pack(position_.micro_batch % options_.world == options_.rank ? &out : nullptr);
    ++position_.micro_batch;
  }
  return true;
}

}  // namespace biomoe
