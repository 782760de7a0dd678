#include "biomoe/data/windows.h"

#include <algorithm>
#include <cmath>

#include "biomoe/core/error.h"

namespace biomoe {
namespace {

constexpr int64_t kScanBases = int64_t{1} << 20;  // read at a time when a store is scanned

// Finds the runs of N of one record, fed in order, and cuts the record around the long ones.
class RunSplitter {
 public:
  RunSplitter(int64_t record, int64_t length, int64_t min_length, std::vector<Segment>& out,
              NRunTotals& totals)
      : record_(record), length_(length), min_length_(min_length), out_(out), totals_(totals) {}

  void feed(const std::vector<uint8_t>& bases, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      if ((bases[static_cast<size_t>(i)] | 0x20) == 'n') {
        ++run_;
      } else if (run_ > 0) {
        close_run(position_ + i);
      }
    }
    position_ += count;
  }

  void finish() {
    const int64_t last_run = run_;
    close_run(length_);
    if (begin_ == length_) {  // ended by a long run (or empty)
      if (!out_.empty() && out_.back().record == record_) out_.back().skipped_after = last_run;
      return;
    }
    add_segment(length_, /*at_end=*/true);
  }

 private:
  void close_run(int64_t end) {
    if (run_ >= min_length_) {
      if (end - run_ > begin_) add_segment(end - run_, /*at_end=*/false);
      begin_ = end;
      skipped_ = run_;
      ++totals_.runs;
      totals_.bases += run_;
    }
    run_ = 0;
  }

  void add_segment(int64_t end, bool at_end) {
    out_.push_back({.record = record_,
                    .begin = begin_,
                    .length = end - begin_,
                    .at_start = begin_ == 0,
                    .at_end = at_end,
                    .skipped_before = skipped_});
    skipped_ = 0;
  }

  int64_t record_;
  int64_t length_;
  int64_t min_length_;
  std::vector<Segment>& out_;
  NRunTotals& totals_;
  int64_t position_ = 0;
  int64_t begin_ = 0;    // of the segment that is open
  int64_t run_ = 0;      // N just before the position
  int64_t skipped_ = 0;  // bases left out just before begin_
};

}  // namespace

std::vector<Segment> whole_records(const SequenceStore& store) {
  std::vector<Segment> out;
  out.reserve(static_cast<size_t>(store.num_records()));
  for (int64_t record = 0; record < store.num_records(); ++record)
    out.push_back({.record = record, .length = store.length(record)});
  return out;
}

std::vector<Segment> split_n_runs(const SequenceStore& store, int64_t min_length, NRunTotals& totals) {
  std::vector<Segment> out;
  std::vector<uint8_t> bases(static_cast<size_t>(kScanBases));
  for (int64_t record = 0; record < store.num_records(); ++record) {
    const int64_t length = store.length(record);
    RunSplitter splitter(record, length, min_length, out, totals);
    for (int64_t begin = 0; begin < length; begin += kScanBases) {
      const int64_t count = std::min(kScanBases, length - begin);
      store.read(record, begin, count, bases.data());
      splitter.feed(bases, count);
    }
    splitter.finish();
  }
  return out;
}

int64_t train_bases(int64_t total, double fraction) {
  // 0.1 is not a tenth in binary: exact products must stay on their side of the floor.
  const auto bases = static_cast<long double>(total);
  const long double slack = 1e-6L + bases * 2e-16L;
  return static_cast<int64_t>(std::floor((1.0L - static_cast<long double>(fraction)) * bases + slack));
}

TrainValidation split_validation(const SequenceStore& store, const std::vector<Segment>& segments,
                                 double fraction) {
  std::vector<int64_t> record_starts{0};
  for (int64_t record = 0; record < store.num_records(); ++record)
    record_starts.push_back(record_starts.back() + store.length(record));
  const int64_t border = train_bases(record_starts.back(), fraction);

  TrainValidation out;
  for (const Segment& segment : segments) {
    const int64_t start = record_starts[static_cast<size_t>(segment.record)] + segment.begin;
    if (start + segment.length <= border) {
      out.train.push_back(segment);
    } else if (start >= border) {
      out.validation.push_back(segment);
    } else {
      Segment head = segment;
      Segment tail = segment;
      head.length = border - start;
      head.at_end = false;
      head.skipped_after = 0;
      tail.begin += head.length;
      tail.length -= head.length;
      tail.at_start = false;
      tail.skipped_before = 0;
      out.train.push_back(head);
      out.validation.push_back(tail);
    }
  }
  return out;
}

WindowIndex::WindowIndex(std::vector<Segment> segments, const WindowOptions& options)
    : segments_(std::move(segments)), options_(options) {
  if (options.max_seq_length < 1)
    throw user_error("max_seq_length={}: must be at least 1", options.max_seq_length);
  if (options.stride < 0 || options.stride >= options.max_seq_length)
    throw user_error("stride={}: must be at least 0 and below max_seq_length={}", options.stride,
                     options.max_seq_length);
  ends_.reserve(segments_.size());
  int64_t windows = 0;
  int64_t shortest = options.max_seq_length;
  for (const Segment& segment : segments_) {
    const int64_t count = windows_of(segment);
    windows += count;
    ends_.push_back(windows);
    num_bases_ += segment.length;
    if (count == 0) continue;
    // Only the last window of a segment is short, and only the first gives a place to BOS.
    const int64_t in_last = inputs_of(segment) - (count - 1) * (options.max_seq_length - options.stride);
    shortest = std::min({shortest, in_last - (count == 1 ? 1 : 0), options.max_seq_length - 1});
  }
  shortest_window_ = std::max<int64_t>(shortest, 1);
}

int64_t WindowIndex::inputs_of(const Segment& segment) const {
  return segment.length + (segment.at_start && options_.add_bos ? 1 : 0);
}

int64_t WindowIndex::windows_of(const Segment& segment) const {
  if (segment.length == 0) return 0;
  const int64_t step = options_.max_seq_length - options_.stride;
  const int64_t beyond_first = std::max<int64_t>(inputs_of(segment) - options_.max_seq_length, 0);
  return 1 + (beyond_first + step - 1) / step;
}

Window WindowIndex::window(int64_t number) const {
  BM_CHECK(number >= 0 && number < num_windows(), "window {} of {}", number, num_windows());
  const auto found = std::upper_bound(ends_.begin(), ends_.end(), number);
  const auto position = static_cast<size_t>(found - ends_.begin());
  const Segment& segment = segments_[position];
  const int64_t in_segment = number - (position == 0 ? 0 : ends_[position - 1]);

  const bool segment_bos = segment.at_start && options_.add_bos;
  const int64_t first_input = in_segment * (options_.max_seq_length - options_.stride);
  const int64_t inputs = std::min(options_.max_seq_length, inputs_of(segment) - first_input);
  Window w;
  w.record = segment.record;
  w.bos = segment_bos && in_segment == 0;
  const int64_t first_base = w.bos ? 0 : first_input - (segment_bos ? 1 : 0);
  w.begin = segment.begin + first_base;
  w.length = inputs - (w.bos ? 1 : 0);
  const bool reaches_end = first_base + w.length == segment.length;
  w.is_first = in_segment == 0;
  w.is_last = number + 1 == *found;
  w.at_start = segment.at_start && first_base == 0;
  w.at_end = segment.at_end && reaches_end;
  w.base_before = first_base > 0;
  w.base_after = !reaches_end;
  w.eos_target = w.at_end && options_.add_eos;
  w.overlap = w.is_first ? 0 : options_.stride;
  w.n_run_skipped = (w.is_first ? segment.skipped_before : 0) + (w.is_last ? segment.skipped_after : 0);
  return w;
}

}  // namespace biomoe
