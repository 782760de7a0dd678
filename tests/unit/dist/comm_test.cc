// Collective operations against what they are defined as, over threads.
#include "biomoe/dist/comm.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <mutex>
#include <numeric>

#include "biomoe/core/rng.h"
#include "tests/ranks.h"

namespace biomoe {
namespace {

using test::run_ranks;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TensorView view(std::vector<float>& values) {
  return TensorView(values.data(), DType::kF32, Shape{static_cast<int64_t>(values.size())});
}

// Values of one rank: they differ in size, so that the order of a sum shows in its bits.
std::vector<float> values_of(int rank, int64_t count) {
  const Rng rng(3, RngStream::kTest, static_cast<uint32_t>(rank));
  std::vector<float> values(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i)
    values[static_cast<size_t>(i)] =
        static_cast<float>(rng.normal(static_cast<uint64_t>(i)) * std::pow(10, rank));
  return values;
}

std::vector<float> summed(int ranks, int64_t count) {
  std::vector<float> sum = values_of(0, count);
  for (int rank = 1; rank < ranks; ++rank) {
    const auto more = values_of(rank, count);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += more[i];
  }
  return sum;
}

TEST(Comm, SumsAreMadeInTheOrderOfRanksOnAllOfThem) {
  for (const int ranks : {1, 2, 3, 4}) {
    // Small, in one piece, and in several with a rest.
    for (const int64_t count : {0, 1, 7, 5000, 300'001}) {
      const auto want = summed(ranks, count);
      run_ranks(ranks, [&](std::unique_ptr<Comm> world) {
        Context ctx;
        auto values = values_of(world->rank(), count);
        world->all_reduce(ctx, view(values), ReduceOp::kSum, "values");
        ASSERT_EQ(values, want) << ranks << " ranks, " << count;
      });
    }
  }
}

TEST(Comm, PartsAreReducedAndGatheredInPlaceOrNot) {
  constexpr int kRanks = 3;
  constexpr int64_t kPart = 100'003;
  const auto want = summed(kRanks, kRanks * kPart);
  for (const bool in_place : {false, true}) {
    run_ranks(kRanks, [&](std::unique_ptr<Comm> world) {
      Context ctx;
      auto values = values_of(world->rank(), kRanks * kPart);
      std::vector<float> part(kPart, std::nanf(""));
      const TensorView own = in_place ? view(values).rows(world->rank() * kPart, kPart) : view(part);
      world->reduce_scatter(ctx, view(values), own, ReduceOp::kSum, "values");
      std::vector<float> all(static_cast<size_t>(kRanks * kPart), std::nanf(""));
      world->all_gather(ctx, own, in_place ? view(values) : view(all), "values");
      EXPECT_EQ(in_place ? values : all, want);
    });
  }
}

TEST(Comm, MaximaAndCounts) {
  run_ranks(4, [](std::unique_ptr<Comm> world) {
    Context ctx;
    std::vector<int64_t> counts{world->rank(), 10 - world->rank(), int64_t{1} << 60};
    const TensorView x(counts.data(), DType::kI64, Shape{3});
    world->all_reduce(ctx, x, ReduceOp::kMax, "counts");
    EXPECT_THAT(counts, ElementsAre(3, 10, int64_t{1} << 60));
    counts = {1, world->rank(), 0};
    world->all_reduce(ctx, x, ReduceOp::kSum, "counts");
    EXPECT_THAT(counts, ElementsAre(4, 6, 0));
  });
}

// Rank a sends (a + b) % 3 rows to b, in two segments; the last rank gets nothing from anybody.
TEST(Comm, RowsGoWhereTheSegmentsSay) {
  constexpr int kRanks = 3;
  const auto rows = [](int from, int to) { return to == kRanks - 1 ? 0 : 2 * ((from + to) % 3); };
  run_ranks(kRanks, [&](std::unique_ptr<Comm> world) {
    Context ctx;
    const int self = world->rank();
    std::vector<RowSegment> send, receive;
    int64_t sent = 0, received = 0;
    for (int peer = 0; peer < kRanks; ++peer) {
      for (int half = 0; half < 2; ++half) {
        send.push_back({peer, sent, rows(self, peer) / 2});
        sent += rows(self, peer) / 2;
        receive.push_back({peer, received, rows(peer, self) / 2});
        received += rows(peer, self) / 2;
      }
    }
    std::vector<int64_t> from(static_cast<size_t>(2 * sent)), to(static_cast<size_t>(2 * received + 2), -1);
    for (const RowSegment& segment : send) {
      for (int64_t i = 2 * segment.begin; i < 2 * (segment.begin + segment.count); ++i)
        from[static_cast<size_t>(i)] = 100 * self + 10 * segment.peer + i % 2;
    }
    world->all_to_all_v(ctx,
                        {.send = TensorView(from.data(), DType::kI64, Shape{sent, 2}),
                         .receive = TensorView(to.data(), DType::kI64, Shape{received + 1, 2}),
                         .send_segments = send,
                         .receive_segments = receive},
                        "rows");
    for (const RowSegment& segment : receive) {
      for (int64_t i = 2 * segment.begin; i < 2 * (segment.begin + segment.count); ++i)
        EXPECT_EQ(to[static_cast<size_t>(i)], 100 * segment.peer + 10 * self + i % 2);
    }
    EXPECT_EQ(to.back(), -1) << "a row that no segment names";
  });
}

TEST(Comm, SplitsMakeGroupsThatDoNotMix) {
  run_ranks(6, [](std::unique_ptr<Comm> world) {
    Context ctx;
    const int rank = world->rank();
    // Ranks of a colour, the highest first; then each of those groups in two again.
    const auto group = world->split(rank % 2, -rank);
    EXPECT_EQ(group->size(), 3);
    EXPECT_EQ(group->rank(), (5 - rank) / 2);
    const auto pair = group->split(group->rank() == 0, 0);
    EXPECT_EQ(pair->size(), group->rank() == 0 ? 1 : 2);
    int64_t sum = rank, inner = rank;
    group->all_reduce(ctx, TensorView(&sum, DType::kI64, Shape{1}), ReduceOp::kSum, "sum");
    pair->all_reduce(ctx, TensorView(&inner, DType::kI64, Shape{1}), ReduceOp::kSum, "sum");
    EXPECT_EQ(sum, rank % 2 ? 9 : 6);
    EXPECT_EQ(inner, group->rank() == 0 ? rank : sum - (rank % 2 ? 5 : 4));
  });
}

TEST(Comm, TextsReachEveryRank) {
  run_ranks(3, [](std::unique_ptr<Comm> world) {
    EXPECT_EQ(broadcast_text(*world, world->rank() == 1 ? "from one" : "other", 1, "text"), "from one");
    EXPECT_THAT(all_gather_text(*world, std::string(static_cast<size_t>(world->rank()), 'x'), "text"),
                ElementsAre("", "x", "xx"));
  });
}

TEST(Comm, ARankThatDoesNotAnswerIsNamed) {
  std::mutex mutex;
  std::vector<std::string> lines;
  run_ranks(
      3,
      [&](std::unique_ptr<Comm> world) {
        if (world->rank() == 1) return;
        try {
          world->barrier("the end of step 7");
        } catch (const Error& error) {
          const std::lock_guard lock(mutex);
          lines.push_back(error.what());
        }
      },
      0.2);
  ASSERT_EQ(lines.size(), 2u);
  for (const std::string& line : lines)
    EXPECT_THAT(line, HasSubstr("the end of step 7 did not complete within 0.2 s: waiting for rank 1"));
}

}  // namespace
}  // namespace biomoe
