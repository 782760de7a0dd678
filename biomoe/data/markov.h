// Markov models of DNA: what a trained model is compared with.
#pragma once

#include <cstdint>
#include <vector>

#include "biomoe/data/sequence_store.h"
#include "biomoe/data/windows.h"

namespace biomoe {

// Over the bases that could be scored.
struct MarkovScore {
  double nats = 0.0;     // sum
  int64_t scored = 0;    // bases
  int64_t unscored = 0;  // other symbols, and bases without a whole context
};

// Order-k model over A C G T (either case; U counts as T): P(x | context) = (n(context, x) + alpha) /
// (n(context) + 4 alpha). A context is the k bases before, unbroken by another symbol or by the end of a
// segment, in fitting and in scoring.
class MarkovModel {
 public:
  static constexpr int kMaxOrder = 12;                  // 4^13 counts: 512 MiB
  explicit MarkovModel(int order, double alpha = 0.5);  // throws user_error for an order outside [0, 12]

  int order() const { return order_; }
  // Adds the counts of `segments` to those of earlier calls.
  void fit(const SequenceStore& store, const std::vector<Segment>& segments);
  MarkovScore score(const SequenceStore& store, const std::vector<Segment>& segments) const;

 private:
  int order_;
  double alpha_;
  std::vector<int64_t> counts_;  // [4^order, 4]
};

}  // namespace biomoe
