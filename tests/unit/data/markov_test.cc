#include "biomoe/data/markov.h"

#include <gtest/gtest.h>

#include <cmath>

#include "biomoe/core/error.h"
#include "tests/unit/data/data_test_helpers.h"

namespace biomoe {
namespace {

using test::SyntheticStore;
using test::TextStore;

TEST(Markov, CountsByHand) {
  const TextStore train({"AACA", "cUNAA"});
  const TextStore held({"AAG", "NT"});
  // Order 0: A 5, C 2, T 1 of 8; the held-out bases are A A G T.
  MarkovModel order0(0);
  order0.fit(train, whole_records(train));
  const MarkovScore zero = order0.score(held, whole_records(held));
  EXPECT_EQ(zero.scored, 4);
  EXPECT_EQ(zero.unscored, 1);
  EXPECT_NEAR(zero.nats, -(2 * std::log(5.5 / 10) + std::log(0.5 / 10) + std::log(1.5 / 10)), 1e-12);
  // Order 1: AA AC CA | CU, AA. Held out: AA, AG.
  MarkovModel order1(1);
  order1.fit(train, whole_records(train));
  const MarkovScore one = order1.score(held, whole_records(held));
  EXPECT_EQ(one.scored, 2);
  EXPECT_EQ(one.unscored, 3);
  EXPECT_NEAR(one.nats, -(std::log(2.5 / 5) + std::log(0.5 / 5)), 1e-12);
}

TEST(Markov, ContextsEndWithTheSegment) {
  const TextStore store({"ACGT"});
  MarkovModel model(1);
  model.fit(store, {{.record = 0, .begin = 0, .length = 2}, {.record = 0, .begin = 2, .length = 2}});
  const TextStore held({"CG"});  // never seen, nor its context
  EXPECT_NEAR(model.score(held, whole_records(held)).nats, std::log(4.0), 1e-12);
}

TEST(Markov, RandomBasesCostTheEntropyAndAChunkBorderNothing) {
  const SyntheticStore store({(int64_t{1} << 20) + 1000});
  MarkovModel model(2);
  model.fit(store, whole_records(store));
  const MarkovScore score = model.score(store, whole_records(store));
  EXPECT_EQ(score.scored, (int64_t{1} << 20) + 998);
  EXPECT_NEAR(score.nats / static_cast<double>(score.scored), std::log(4.0), 1e-4);
}

TEST(Markov, RefusesOrdersOutOfRange) {
  EXPECT_THROW(MarkovModel(-1), Error);
  EXPECT_THROW(MarkovModel(13), Error);
}

}  // namespace
}  // namespace biomoe
