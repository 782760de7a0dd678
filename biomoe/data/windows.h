// Windows: how records become training sequences of at most max_seq_length tokens.
//
// A *segment* is a stretch of bases of one record that is read as one text: the whole record, or what remains
// of it after runs of N are split out and the validation part is cut off. A segment reads as
//     [BOS] b0 b1 ... b(n-1) [EOS]
// with BOS only where the segment starts at the true start of its record, EOS only where it ends at the true
// end. The input tokens are all of these but EOS (nothing follows EOS, so it is only ever a target); the
// target of an input is the token that follows it, none after the last base of a cut end. Window w of a
// segment holds the inputs [w * (L - s), w * (L - s) + L) with L = max_seq_length (BOS counts) and s =
// stride, as far as there are any. The target of a window's last input is the next token of the segment, so
// at stride 0 every token but the first base after a cut start is predicted exactly once; with a stride,
// consecutive windows share s inputs. A segment shorter than a window gives one short window, a segment
// without bases none.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "biomoe/data/sequence_store.h"

namespace biomoe {

struct Segment {
  int64_t record = 0;
  int64_t begin = 0;           // first base, in the record
  int64_t length = 0;          // bases
  bool at_start = true;        // begins at the true start of the record
  bool at_end = true;          // ends at the true end of the record
  int64_t skipped_before = 0;  // bases of the N run split out just before; counted once, with window 0
  int64_t skipped_after = 0;   // as above, of a run that ends the record; counted with the last window
};

// One segment a record.
std::vector<Segment> whole_records(const SequenceStore& store);

struct NRunTotals {
  int64_t runs = 0;
  int64_t bases = 0;
};
// Records split around every run of at least `min_length` N (either case); a record that is nothing else
// gives no segment. Reads the whole store once; adds up what was left out in `totals`.
std::vector<Segment> split_n_runs(const SequenceStore& store, int64_t min_length, NRunTotals& totals);

// The last part of the bases, in order, for validation: of `total` bases (which may count bases that no
// segment covers) the first floor((1 - fraction) * total) are trained on. A segment across the border is cut
// in two.
struct TrainValidation {
  std::vector<Segment> train;
  std::vector<Segment> validation;
};
int64_t train_bases(int64_t total, double fraction);
TrainValidation split_validation(const SequenceStore& store, const std::vector<Segment>& segments,
                                 double fraction);

struct WindowOptions {
  int64_t max_seq_length = 1024;  // L >= 1
  int64_t stride = 0;             // s in [0, L)
  bool add_bos = true;
  bool add_eos = true;
};

struct Window {
  int64_t record = 0;
  int64_t begin = 0;          // first base, in the record
  int64_t length = 0;         // bases; may be 0 when BOS alone fills a window of one token
  bool bos = false;           // the first input is BOS
  bool is_first = false;      // of its segment
  bool is_last = false;       // of its segment
  bool at_start = false;      // begins at the true start of the record
  bool at_end = false;        // ends at the true end of the record
  bool base_before = false;   // the segment has a base just before `begin`
  bool base_after = false;    // the segment has a base just after the window: the target of the last input
  bool eos_target = false;    // the target of the last input is EOS
  int64_t overlap = 0;        // leading inputs that the window before holds too
  int64_t n_run_skipped = 0;  // bases of N runs that are counted with this window
  int64_t num_tokens() const { return length + (bos ? 1 : 0); }
};

// All windows of a list of segments, numbered from 0 in order. Memory: the segments and one sum for each.
class WindowIndex {
 public:
  WindowIndex() = default;
  // Throws user_error when max_seq_length or stride are out of range.
  WindowIndex(std::vector<Segment> segments, const WindowOptions& options);

  int64_t num_windows() const { return ends_.empty() ? 0 : ends_.back(); }
  int64_t num_bases() const { return num_bases_; }  // of the segments, each counted once
  int64_t num_segments() const { return static_cast<int64_t>(segments_.size()); }
  size_t memory_bytes() const {
    return segments_.capacity() * sizeof(Segment) + ends_.capacity() * sizeof(int64_t);
  }
  const std::vector<Segment>& segments() const { return segments_; }
  const WindowOptions& options() const { return options_; }

  Window window(int64_t number) const;  // O(log segments)
  // Bases of the shortest window (a lone BOS counts as 1): bounds the windows of a batch.
  int64_t shortest_window() const { return shortest_window_; }

 private:
  int64_t inputs_of(const Segment& segment) const;
  int64_t windows_of(const Segment& segment) const;

  std::vector<Segment> segments_;
  std::vector<int64_t> ends_;  // windows up to and with each segment
  WindowOptions options_;
  int64_t num_bases_ = 0;
  int64_t shortest_window_ = 1;
};

}  // namespace biomoe
