#include "biomoe/data/windows.h"

#include <gtest/gtest.h>

#include <string>

#include "biomoe/core/error.h"
#include "tests/unit/data/data_test_helpers.h"

namespace biomoe {
namespace {

using test::SyntheticStore;
using test::TextStore;

std::string bases(char symbol, size_t count) {
  return std::string(count, symbol);
}

struct Cut {
  int64_t record, begin, length;
  bool at_start, at_end;
  int64_t before, after;
  bool operator==(const Cut&) const = default;
};
std::vector<Cut> cuts(const std::vector<Segment>& segments) {
  std::vector<Cut> out;
  for (const Segment& s : segments)
    out.push_back({s.record, s.begin, s.length, s.at_start, s.at_end, s.skipped_before, s.skipped_after});
  return out;
}

TEST(NRuns, SplitARecordAtTheLongOnes) {
  const TextStore store({bases('N', 5) + "ACGT" + bases('n', 6) + "AC" + bases('N', 4) + "GG" + bases('N', 5),
                         bases('N', 9), "", "ACNNNNGT", bases('A', 3) + bases('N', 5) + "C"});
  NRunTotals totals;
  EXPECT_EQ(cuts(split_n_runs(store, 5, totals)), (std::vector<Cut>{{0, 5, 4, false, false, 5, 0},
                                                                    {0, 15, 8, false, false, 6, 5},
                                                                    {3, 0, 8, true, true, 0, 0},
                                                                    {4, 0, 3, true, false, 0, 0},
                                                                    {4, 8, 1, false, true, 5, 0}}));
  EXPECT_EQ(totals.runs, 5);
  EXPECT_EQ(totals.bases, 5 + 6 + 5 + 9 + 5);
}

TEST(NRuns, AreFoundAcrossTheChunksOfTheScan) {
  const size_t chunk = size_t{1} << 20;
  const TextStore store({bases('A', chunk - 50) + bases('N', 100) + bases('C', 10)});
  NRunTotals totals;
  const auto segments = split_n_runs(store, 100, totals);
  ASSERT_EQ(segments.size(), 2u);
  EXPECT_EQ(segments[1].begin, static_cast<int64_t>(chunk + 50));
  NRunTotals none;
  EXPECT_EQ(split_n_runs(store, 101, none).size(), 1u);
  EXPECT_EQ(none.bases, 0);
}

TEST(Validation, IsTheLastPartOfTheBases) {
  EXPECT_EQ(train_bases(4639675, 0.1), 4175707);  // E. coli K-12
  EXPECT_EQ(train_bases(10, 0.1), 9);
  EXPECT_EQ(train_bases(10, 0.3), 7);
  EXPECT_EQ(train_bases(1'000'000'000'000, 0.1), 900'000'000'000);
  EXPECT_EQ(train_bases(3, 0.5), 1);

  const TextStore store({bases('A', 4), bases('C', 10), bases('G', 6)});
  const auto split = split_validation(store, whole_records(store), 0.5);
  EXPECT_EQ(cuts(split.train), (std::vector<Cut>{{0, 0, 4, true, true, 0, 0}, {1, 0, 6, true, false, 0, 0}}));
  EXPECT_EQ(cuts(split.validation),
            (std::vector<Cut>{{1, 6, 4, false, true, 0, 0}, {2, 0, 6, true, true, 0, 0}}));
  const auto between = split_validation(store, whole_records(store), 0.3);
  EXPECT_EQ(cuts(between.train),
            (std::vector<Cut>{{0, 0, 4, true, true, 0, 0}, {1, 0, 10, true, true, 0, 0}}));
}

TEST(Validation, CountsTheBasesThatWereSplitOut) {
  const TextStore store({bases('A', 5) + bases('N', 10) + bases('C', 5)});
  NRunTotals totals;
  const auto split =
      split_validation(store, split_n_runs(store, 10, totals), 0.5);  // the border is in the run
  EXPECT_EQ(cuts(split.train), (std::vector<Cut>{{0, 0, 5, true, false, 0, 0}}));
  EXPECT_EQ(cuts(split.validation), (std::vector<Cut>{{0, 15, 5, false, true, 10, 0}}));
}

TEST(WindowIndex, CutsInputsNotBases) {
  const SyntheticStore store({10});
  const WindowIndex index(whole_records(store), {.max_seq_length = 4});  // inputs: BOS b0 .. b9
  ASSERT_EQ(index.num_windows(), 3);
  const Window first = index.window(0), middle = index.window(1), last = index.window(2);
  EXPECT_TRUE(first.bos && first.is_first && first.at_start && first.base_after && !first.eos_target);
  EXPECT_EQ(first.begin, 0);
  EXPECT_EQ(first.length, 3);
  EXPECT_TRUE(!middle.bos && !middle.is_first && !middle.is_last && middle.base_before && middle.base_after);
  EXPECT_EQ(middle.begin, 3);
  EXPECT_EQ(middle.length, 4);
  EXPECT_TRUE(last.is_last && last.at_end && last.eos_target && !last.base_after);
  EXPECT_EQ(last.begin, 7);
  EXPECT_EQ(last.num_tokens(), 3);
  EXPECT_THROW(index.window(3), Error);
  EXPECT_THROW(index.window(-1), Error);
}

TEST(WindowIndex, StrideIsTheOverlap) {
  const SyntheticStore store({20, 2, 0});
  const WindowIndex index(whole_records(store), {.max_seq_length = 8, .stride = 3, .add_bos = false});
  ASSERT_EQ(index.num_windows(), 5);  // inputs 0-7, 5-12, 10-17, 15-19; then 0-1
  for (int64_t w = 0; w < 4; ++w) {
    EXPECT_EQ(index.window(w).begin, 5 * w);
    EXPECT_EQ(index.window(w).overlap, w == 0 ? 0 : 3);
  }
  EXPECT_EQ(index.window(3).length, 5);
  EXPECT_EQ(index.window(4).record, 1);
  EXPECT_EQ(index.num_bases(), 22);
}

TEST(WindowIndex, RecordsBeyondFourGigabases) {
  const int64_t length = (int64_t{3} << 32) + 5;
  const SyntheticStore store({7, length});
  const WindowIndex index(whole_records(store), {.max_seq_length = 1024});
  const int64_t windows = (length + 1 + 1023) / 1024;
  ASSERT_EQ(index.num_windows(), 1 + windows);
  const Window last = index.window(windows);
  EXPECT_TRUE(last.is_last && last.at_end);
  EXPECT_EQ(last.begin + last.length, length);
  EXPECT_EQ(last.begin, (windows - 1) * 1024 - 1);
  EXPECT_GT(last.begin, int64_t{1} << 33);
}

TEST(WindowIndex, RefusesBadSizes) {
  const SyntheticStore store({5});
  EXPECT_THROW(WindowIndex(whole_records(store), {.max_seq_length = 0}), Error);
  EXPECT_THROW(WindowIndex(whole_records(store), {.max_seq_length = 4, .stride = 4}), Error);
  EXPECT_THROW(WindowIndex(whole_records(store), {.max_seq_length = 4, .stride = -1}), Error);
  EXPECT_EQ(WindowIndex({}, {}).num_windows(), 0);
}

}  // namespace
}  // namespace biomoe
