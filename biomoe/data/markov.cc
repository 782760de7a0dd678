#include "biomoe/data/markov.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "biomoe/core/error.h"

namespace biomoe {
namespace {

constexpr int64_t kChunk = int64_t{1} << 20;
constexpr uint8_t kBreak = 4;

constexpr std::array<uint8_t, 256> base_codes() {
  std::array<uint8_t, 256> codes{};
  for (uint8_t& code : codes) code = kBreak;
  codes['A'] = codes['a'] = 0;
  codes['C'] = codes['c'] = 1;
  codes['G'] = codes['g'] = 2;
  codes['T'] = codes['t'] = codes['U'] = codes['u'] = 3;
  return codes;
}
constexpr std::array<uint8_t, 256> kBaseCodes = base_codes();

// Calls visit(row) for each base with a whole context, where row = context * 4 + base; returns how many
// symbols had none.
template <typename Visit>
int64_t for_each_row(int order, const SequenceStore& store, const std::vector<Segment>& segments,
                     Visit visit) {
  const uint64_t mask = (uint64_t{1} << (2 * order + 2)) - 1;
  std::vector<uint8_t> bases(static_cast<size_t>(kChunk));
  int64_t without = 0;
  for (const Segment& segment : segments) {
    uint64_t row = 0;
    int known = 0;  // bases in the context, up to the order
    for (int64_t begin = 0; begin < segment.length; begin += kChunk) {
      const int64_t count = std::min(kChunk, segment.length - begin);
      store.read(segment.record, segment.begin + begin, count, bases.data());
      for (int64_t i = 0; i < count; ++i) {
        const uint8_t code = kBaseCodes[bases[static_cast<size_t>(i)]];
        if (code == kBreak) {
          known = 0;
          ++without;
          continue;
        }
        row = (row << 2 | code) & mask;
        if (known < order) {
          ++known;
          ++without;
        } else {
          visit(static_cast<size_t>(row));
        }
      }
    }
  }
  return without;
}

}  // namespace

MarkovModel::MarkovModel(int order, double alpha) : order_(order), alpha_(alpha) {
  if (order < 0 || order > kMaxOrder)
    throw user_error("a Markov model of order {}: must be 0 to {}", order, kMaxOrder);
  BM_CHECK(alpha > 0, "smoothing by {}", alpha);
  counts_.assign(size_t{1} << (2 * order + 2), 0);
}

void MarkovModel::fit(const SequenceStore& store, const std::vector<Segment>& segments) {
  for_each_row(order_, store, segments, [&](size_t row) { ++counts_[row]; });
}

MarkovScore MarkovModel::score(const SequenceStore& store, const std::vector<Segment>& segments) const {
  MarkovScore score;
  score.unscored = for_each_row(order_, store, segments, [&](size_t row) {
    const size_t context = row & ~size_t{3};
    const int64_t seen =
        counts_[context] + counts_[context + 1] + counts_[context + 2] + counts_[context + 3];
    score.nats -=
        std::log((static_cast<double>(counts_[row]) + alpha_) / (static_cast<double>(seen) + 4 * alpha_));
    ++score.scored;
  });
  return score;
}

}  // namespace biomoe
