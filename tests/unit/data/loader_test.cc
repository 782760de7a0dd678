#include "biomoe/data/loader.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "biomoe/core/error.h"
#include "tests/unit/data/data_test_helpers.h"

namespace biomoe {
namespace {

using test::contains;
using test::error_of;
using test::SyntheticStore;
using test::TextStore;

const Vocabulary& dna() {
  static const Vocabulary vocabulary = Vocabulary::dna();
  return vocabulary;
}

std::shared_ptr<const SequencePart> make_part(std::shared_ptr<const SequenceStore> store,
                                              const WindowOptions& options,
                                              std::vector<Segment> segments = {}) {
  if (segments.empty()) segments = whole_records(*store);
  return std::make_shared<SequencePart>(SequencePart{store, WindowIndex(std::move(segments), options)});
}

std::shared_ptr<const SequencePart> text_part(std::vector<std::string> records,
                                              const WindowOptions& options) {
  return make_part(std::make_shared<TextStore>(std::move(records)), options);
}

LoaderOptions in_order(int64_t tokens, int64_t workers = 0) {
  LoaderOptions options;
  options.plan.token_micro_batch_size = tokens;
  options.plan.shuffle = false;
  options.plan.repeat = false;
  options.num_workers = workers;
  return options;
}

struct Got {
  std::vector<int32_t> tokens, targets, positions, cu_seqlens;
  std::vector<float> weights;
  int64_t valid = 0;
  double weight = 0;
  std::vector<int64_t> windows;
  bool operator==(const Got&) const = default;
};

std::vector<Got> take(Loader& loader, int64_t most = 1 << 20) {
  std::vector<Got> out;
  Batch batch;
  std::vector<SequenceSource> sources;
  while (static_cast<int64_t>(out.size()) < most && loader.next(batch, &sources)) {
    Got got{batch.tokens,       batch.targets,       batch.positions,     batch.cu_seqlens,
            batch.loss_weights, batch.valid_targets, batch.target_weight, {}};
    for (const SequenceSource& source : sources) got.windows.push_back(source.window);
    out.push_back(got);
  }
  return out;
}

void check_consistency(const Batch& batch, int64_t most_tokens) {
  const size_t n = batch.tokens.size();
  ASSERT_LE(batch.num_tokens(), most_tokens);
  ASSERT_EQ(batch.targets.size(), n);
  ASSERT_EQ(batch.loss_weights.size(), n);
  ASSERT_EQ(batch.positions.size(), n);
  ASSERT_EQ(batch.cu_seqlens.front(), 0);
  ASSERT_EQ(batch.cu_seqlens.back(), static_cast<int32_t>(n));
  int64_t valid = 0;
  double weight = 0;
  for (int64_t b = 0; b < batch.num_sequences(); ++b)
    for (int32_t i = batch.cu_seqlens[static_cast<size_t>(b)];
         i < batch.cu_seqlens[static_cast<size_t>(b) + 1]; ++i) {
      const auto p = static_cast<size_t>(i);
      EXPECT_EQ(batch.positions[p], i - batch.cu_seqlens[static_cast<size_t>(b)]);
      EXPECT_EQ(batch.targets[p] == kIgnoreTarget, batch.loss_weights[p] == 0.0f);
      valid += batch.loss_weights[p] > 0;
      weight += static_cast<double>(batch.loss_weights[p]);
    }
  EXPECT_EQ(batch.valid_targets, valid);
  EXPECT_DOUBLE_EQ(batch.target_weight, weight);
}

TEST(Loader, SpellsOutASmallExample) {
  Loader loader(text_part({"ACGTN", "G", "", "aC"}, {.max_seq_length = 4}), dna(), in_order(8));
  Batch batch;
  std::vector<SequenceSource> sources;
  ASSERT_TRUE(loader.next(batch, &sources));
  // windows: [BOS A C G] [T N] [BOS G] | [BOS a C]
  EXPECT_EQ(batch.tokens, (std::vector<int32_t>{2, 4, 5, 6, 7, 8, 2, 6}));
  EXPECT_EQ(batch.targets, (std::vector<int32_t>{4, 5, 6, 7, kIgnoreTarget, 0, 6, 0}));
  EXPECT_EQ(batch.loss_weights, (std::vector<float>{1, 1, 1, 1, 0, 1, 1, 1}));
  EXPECT_EQ(batch.positions, (std::vector<int32_t>{0, 1, 2, 3, 0, 1, 0, 1}));
  EXPECT_EQ(batch.cu_seqlens, (std::vector<int32_t>{0, 4, 6, 8}));
  EXPECT_EQ(batch.counts.bases, 6);
  EXPECT_EQ(batch.counts.degenerate_masked, 1);
  EXPECT_EQ(sources[1],
            (SequenceSource{.record = 0, .begin = 3, .bases = 2, .window = 1, .reversed = false}));
  ASSERT_TRUE(loader.next(batch, &sources));
  EXPECT_EQ(batch.tokens, (std::vector<int32_t>{2, 4, 5}));
  EXPECT_EQ(batch.targets, (std::vector<int32_t>{4, 5, 0}));
  EXPECT_EQ(batch.counts.soft_masked, 1);
  EXPECT_FALSE(loader.next(batch));
  EXPECT_FALSE(loader.next(batch));
  EXPECT_EQ(loader.counts().bases, 8);
}

// Against a plain reading of the definition, for many sizes: with each base scored once, every token of a
// segment is predicted exactly once, from exactly the context its window gives.
TEST(Loader, PredictsEveryTokenOnce) {
  const Rng rng(3, RngStream::kTest);
  uint64_t draw = 0;
  for (int trial = 0; trial < 200; ++trial) {
    std::vector<std::string> records(1 + rng.u64(draw++) % 4);
    for (std::string& record : records) {
      record.resize(rng.u64(draw++) % 30);
      for (char& base : record) base = "ACGT"[rng.u64(draw++) % 4];
    }
    WindowOptions options;
    options.max_seq_length = static_cast<int64_t>(1 + rng.u64(draw++) % 9);
    options.stride = static_cast<int64_t>(rng.u64(draw++) % static_cast<uint64_t>(options.max_seq_length));
    options.add_bos = rng.u64(draw++) % 2 == 0;
    options.add_eos = rng.u64(draw++) % 2 == 0;
    SCOPED_TRACE(fmt::format("trial {} L={} s={} bos={} eos={}", trial, options.max_seq_length,
                             options.stride, options.add_bos, options.add_eos));
    const auto part = text_part(records, options);
    if (part->windows.num_windows() == 0) continue;
    LoaderOptions loading = in_order(16);
    loading.policies.score_each_base_once = true;
    Loader loader(part, dna(), loading);

    std::vector<std::vector<int>> predicted(records.size());  // by record and position in [BOS] bases [EOS]
    std::vector<std::vector<int32_t>> text(records.size());
    for (size_t r = 0; r < records.size(); ++r) {
      if (options.add_bos) text[r].push_back(2);
      for (const char base : records[r]) text[r].push_back(dna().id(static_cast<uint8_t>(base)));
      if (options.add_eos) text[r].push_back(0);
      predicted[r].assign(text[r].size(), 0);
    }
    Batch batch;
    std::vector<SequenceSource> sources;
    while (loader.next(batch, &sources)) {
      check_consistency(batch, 16);
      ASSERT_EQ(sources.size(), static_cast<size_t>(batch.num_sequences()));
      for (size_t b = 0; b < sources.size(); ++b) {
        const auto r = static_cast<size_t>(sources[b].record);
        const auto first = static_cast<size_t>(batch.cu_seqlens[b]);
        const auto count = static_cast<size_t>(batch.cu_seqlens[b + 1]) - first;
        ASSERT_LE(count, static_cast<size_t>(options.max_seq_length));
        const bool bos = options.add_bos && batch.tokens[first] == 2;
        const size_t start = static_cast<size_t>(sources[b].begin) + (options.add_bos && !bos ? 1 : 0);
        for (size_t i = 0; i < count; ++i) {
          ASSERT_EQ(batch.tokens[first + i], text[r][start + i]);
          if (batch.targets[first + i] == kIgnoreTarget) continue;
          ASSERT_EQ(batch.targets[first + i], text[r].at(start + i + 1));
          ++predicted[r][start + i + 1];
        }
      }
    }
    for (size_t r = 0; r < records.size(); ++r)
      for (size_t i = 0; !records[r].empty() && i < predicted[r].size(); ++i)
        EXPECT_EQ(predicted[r][i], i == 0 ? 0 : 1) << "record " << r << " token " << i;
  }
}

TEST(Loader, CutEndsHaveNoBosNoEosAndNoTargetBeyond) {
  const auto store = std::make_shared<TextStore>(std::vector<std::string>{"ACGTACGT"});
  Segment middle{
      .record = 0, .begin = 2, .length = 3, .at_start = false, .at_end = false, .skipped_before = 7};
  middle.skipped_after = 5;
  Loader loader(make_part(store, {.max_seq_length = 8}, {middle}), dna(), in_order(8));
  Batch batch;
  ASSERT_TRUE(loader.next(batch));
  EXPECT_EQ(batch.tokens, (std::vector<int32_t>{6, 7, 4}));
  EXPECT_EQ(batch.targets, (std::vector<int32_t>{7, 4, kIgnoreTarget}));
  EXPECT_EQ(batch.counts.n_run_skipped, 12);
}

TEST(Loader, SoftMaskedPolicies) {
  const std::string record = "AcGtn";
  const auto run = [&](SoftMaskedPolicy policy, double weight, bool mask) {
    LoaderOptions options = in_order(8);
    options.policies = {.mask_degenerate_bases = mask, .soft_masked = policy, .soft_masked_weight = weight};
    Loader loader(text_part({record}, {.max_seq_length = 8}),
                  Vocabulary::dna(policy != SoftMaskedPolicy::kKeep), options);
    return take(loader).at(0);
  };
  const Got upper = run(SoftMaskedPolicy::kUpper, 0.25, true);
  EXPECT_EQ(upper.tokens, (std::vector<int32_t>{2, 4, 5, 6, 7, 8}));
  EXPECT_EQ(upper.weights, (std::vector<float>{1, 1, 1, 1, 0, 1}));
  const Got keep = run(SoftMaskedPolicy::kKeep, 0.25, true);
  EXPECT_EQ(keep.tokens, (std::vector<int32_t>{2, 4, 10, 6, 12, 13}));
  EXPECT_EQ(keep.weights, (std::vector<float>{1, 1, 1, 1, 0, 1}));
  const Got weighted = run(SoftMaskedPolicy::kWeight, 0.25, true);
  EXPECT_EQ(weighted.tokens, upper.tokens);
  EXPECT_EQ(weighted.weights, (std::vector<float>{1, 0.25, 1, 0.25, 0, 1}));
  EXPECT_DOUBLE_EQ(weighted.weight, 3.5);
  EXPECT_EQ(run(SoftMaskedPolicy::kWeight, 0.25, false).weights,
            (std::vector<float>{1, 0.25, 1, 0.25, 0.25, 1}));
  const Got zero = run(SoftMaskedPolicy::kWeight, 0.0, false);
  EXPECT_EQ(zero.targets, (std::vector<int32_t>{4, kIgnoreTarget, 6, kIgnoreTarget, kIgnoreTarget, 0}));
  EXPECT_EQ(zero.valid, 3);
}

TEST(Loader, ABatchOfNothingButNHasNoTarget) {
  Loader loader(text_part({std::string(20, 'N')}, {.max_seq_length = 8, .add_eos = false}), dna(),
                in_order(8));
  Batch batch;
  int64_t masked = 0;
  while (loader.next(batch)) {
    check_consistency(batch, 8);
    EXPECT_EQ(batch.valid_targets, 0);
    EXPECT_EQ(batch.target_weight, 0.0);
    masked += batch.counts.degenerate_masked;
  }
  EXPECT_EQ(masked, 20);
  EXPECT_EQ(loader.counts().degenerate_masked, 20);
}

std::shared_ptr<const SequencePart> mixed_part() {
  static const auto part = [] {
    std::vector<int64_t> lengths;
    for (int64_t i = 0; i < 60; ++i) lengths.push_back((i * 37) % 53);
    return make_part(std::make_shared<SyntheticStore>(lengths), {.max_seq_length = 16, .stride = 3});
  }();
  return part;
}

LoaderOptions shuffled(int64_t workers, int64_t rank = 0, int64_t world = 1) {
  LoaderOptions options;
  options.plan = {
      .token_micro_batch_size = 40, .seed = 9, .shuffle = true, .repeat = true, .rank = rank, .world = world};
  options.plan.reverse_complement_prob = 0.4;
  options.num_workers = workers;
  return options;
}

TEST(Loader, AnyNumberOfWorkersGivesTheSameBatches) {
  Loader alone(mixed_part(), dna(), shuffled(0));
  const std::vector<Got> want = take(alone, 300);  // several epochs
  for (const int64_t workers : {1, 3, 8}) {
    Loader loader(mixed_part(), dna(), shuffled(workers));
    EXPECT_EQ(take(loader, 300), want) << workers;
    EXPECT_EQ(loader.position(), alone.position());
    EXPECT_EQ(loader.counts(), alone.counts());
  }
}

TEST(Loader, RanksShareOneSequence) {
  Loader alone(mixed_part(), dna(), shuffled(0));
  const std::vector<Got> want = take(alone, 120);
  for (const int64_t world : {2, 3, 5}) {
    for (int64_t rank = 0; rank < world; ++rank) {
      Loader loader(mixed_part(), dna(), shuffled(1, rank, world));
      const std::vector<Got> got = take(loader, 20);
      for (size_t i = 0; i < got.size(); ++i)
        EXPECT_EQ(got[i], want.at(i * static_cast<size_t>(world) + static_cast<size_t>(rank)))
            << world << " " << i;
      EXPECT_EQ(loader.position().micro_batch, 20 * world);
    }
  }
}

TEST(Loader, EveryEpochHoldsEveryWindowOnceInAnOrderOfItsOwn) {
  Loader loader(mixed_part(), dna(), shuffled(2));
  const auto windows = static_cast<size_t>(loader.windows_per_epoch());
  std::vector<int64_t> order;
  while (order.size() < 3 * windows)
    for (const Got& got : take(loader, 1)) order.insert(order.end(), got.windows.begin(), got.windows.end());
  std::vector<std::vector<int64_t>> epochs;
  for (size_t epoch = 0; epoch < 3; ++epoch) {
    const auto first = order.begin() + static_cast<int64_t>(epoch * windows);
    std::vector<int64_t> one(first, first + static_cast<int64_t>(windows));
    epochs.push_back(one);
    std::sort(one.begin(), one.end());
    for (size_t i = 0; i < windows; ++i) ASSERT_EQ(one[i], static_cast<int64_t>(i));
  }
  EXPECT_NE(epochs[0], epochs[1]);
  EXPECT_NE(epochs[1], epochs[2]);
}

TEST(Loader, ResumesAnywhereEvenOnAnotherNumberOfRanks) {
  Loader alone(mixed_part(), dna(), shuffled(0));
  const std::vector<Got> want = take(alone, 100);
  Loader first(mixed_part(), dna(), shuffled(3));
  take(first, 35);
  const LoaderPosition position = first.position();
  EXPECT_EQ(position.micro_batch, 35);
  Loader second(mixed_part(), dna(), shuffled(2), position);
  EXPECT_EQ(take(second, 20), std::vector<Got>(want.begin() + 35, want.begin() + 55));
  first.seek({});
  EXPECT_EQ(take(first, 10), std::vector<Got>(want.begin(), want.begin() + 10));
  first.seek(second.position());
  EXPECT_EQ(take(first, 10), std::vector<Got>(want.begin() + 55, want.begin() + 65));

  // On three ranks, micro-batch i still belongs to rank i % 3: 35 to rank 2, 36 to rank 0, 37 to rank 1.
  for (int64_t rank = 0; rank < 3; ++rank) {
    Loader part(mixed_part(), dna(), shuffled(1, rank, 3), position);
    const std::vector<Got> got = take(part, 2);
    const auto offset = static_cast<size_t>((rank + 1) % 3);
    EXPECT_EQ(got[0], want[35 + offset]);
    EXPECT_EQ(got[1], want[38 + offset]);
    EXPECT_EQ(part.position().micro_batch, 41);
  }
}

TEST(Loader, SeeksDeepIntoAHugeRecordWithoutReadingIt) {
  const int64_t length = (int64_t{1} << 33) + 77;
  const auto part =
      make_part(std::make_shared<SyntheticStore>(std::vector<int64_t>{3, length}), {.max_seq_length = 64});
  Loader loader(part, dna(), in_order(64, 1), {.sample = part->windows.num_windows() - 1, .micro_batch = 5});
  Batch batch;
  std::vector<SequenceSource> sources;
  ASSERT_TRUE(loader.next(batch, &sources));
  const int64_t begin = sources[0].begin;
  EXPECT_GT(begin, int64_t{1} << 33);
  EXPECT_EQ(begin + sources[0].bases, length);
  for (size_t i = 0; i < batch.tokens.size(); ++i)
    EXPECT_EQ(batch.tokens[i], dna().id(SyntheticStore::base(1, begin + static_cast<int64_t>(i))));
  EXPECT_EQ(batch.targets.back(), 0);
  EXPECT_FALSE(loader.next(batch));
}

TEST(Loader, AFullPassEndsOnAllRanksTogether) {
  const auto part = text_part({"ACG", "ACG", "ACG"}, {.max_seq_length = 4});
  LoaderOptions options = in_order(4, 1);
  options.plan.world = 2;
  Batch batch;
  Loader even(part, dna(), options);
  options.plan.rank = 1;
  Loader odd(part, dna(), options);
  ASSERT_TRUE(even.next(batch));
  ASSERT_TRUE(even.next(batch));
  EXPECT_EQ(batch.num_tokens(), 4);
  EXPECT_FALSE(even.next(batch));
  ASSERT_TRUE(odd.next(batch));
  ASSERT_TRUE(odd.next(batch));  // three micro-batches for two ranks: the last is empty, not missing
  EXPECT_EQ(batch.num_tokens(), 0);
  EXPECT_EQ(batch.cu_seqlens, std::vector<int32_t>{0});
  EXPECT_EQ(batch.valid_targets, 0);
  EXPECT_FALSE(odd.next(batch));
}

TEST(Loader, ASetSmallerThanABatchGivesOneShortBatch) {
  Loader loader(text_part({"ACG"}, {.max_seq_length = 64}), dna(), in_order(4096, 1));
  const std::vector<Got> got = take(loader);
  ASSERT_EQ(got.size(), 1u);
  EXPECT_EQ(got[0].tokens.size(), 4u);
}

TEST(Loader, TheOtherStrand) {
  LoaderOptions options = in_order(64);
  options.plan.reverse_complement_prob = 1.0;
  Loader loader(text_part({"AACGTNRac"}, {.max_seq_length = 4}), Vocabulary::dna(false), options);
  // Forward windows hold AAC, GTNR and ac; reversed GTT, YNAC and gt.
  const Got got = take(loader).at(0);
  EXPECT_EQ(got.cu_seqlens, (std::vector<int32_t>{0, 3, 7, 10}));
  EXPECT_EQ(got.tokens, (std::vector<int32_t>{6, 7, 7, 8, 8, 4, 5, 2, 11, 12}));
  EXPECT_EQ(got.targets, (std::vector<int32_t>{7, 7, 0, kIgnoreTarget, 4, 5, 6, 11, 12, kIgnoreTarget}));
  EXPECT_EQ(loader.counts().reverse_complemented, 3);
}

TEST(Loader, TheStrandIsDrawnByTheSample) {
  LoaderOptions options = in_order(16);
  options.plan.repeat = true;
  options.plan.reverse_complement_prob = 0.3;
  Loader loader(text_part({"ACGTACGTAC"}, {.max_seq_length = 16}), dna(), options);
  Batch batch;
  for (int i = 0; i < 3000; ++i) ASSERT_TRUE(loader.next(batch));
  EXPECT_NEAR(static_cast<double>(loader.counts().reverse_complemented), 900, 120);  // 5 sigma
}

struct BrokenStore : TextStore {
  using TextStore::TextStore;
  void read(int64_t record, int64_t begin, int64_t count, uint8_t* out) const override {
    if (record == 2) throw failure("record {} cannot be read", record);
    TextStore::read(record, begin, count, out);
  }
};

TEST(Loader, RethrowsAtTheBatchThatFailed) {
  const auto store = std::make_shared<BrokenStore>(std::vector<std::string>{"AC", "GT", "AA", "CC"});
  for (const int64_t workers : {0, 1, 4}) {
    Loader loader(make_part(store, {.max_seq_length = 3}), dna(), in_order(3, workers));
    Batch batch;
    ASSERT_TRUE(loader.next(batch));
    ASSERT_TRUE(loader.next(batch));
    EXPECT_TRUE(contains(error_of([&] { loader.next(batch); }), "record 2 cannot be read"));
    EXPECT_THROW(loader.next(batch), Error);
    loader.seek({});
    EXPECT_TRUE(loader.next(batch));
  }
}

TEST(Loader, RefusesWhatCannotWork) {
  const auto part = text_part({"ACGT"}, {.max_seq_length = 8});
  EXPECT_TRUE(contains(error_of([&] { Loader(part, dna(), in_order(7)); }), "token_micro_batch_size=7"));
  EXPECT_TRUE(contains(error_of([&] { Loader(text_part({"", ""}, {}), dna(), in_order(4096)); }), "empty"));
  LoaderOptions reversed = in_order(8);
  reversed.plan.reverse_complement_prob = 0.5;
  EXPECT_TRUE(
      contains(error_of([&] { Loader(part, Vocabulary::protein(), reversed); }), "no reverse complement"));
  EXPECT_TRUE(contains(error_of([&] { Loader(text_part({"ACGT"}, {.max_seq_length = 1}), dna(), reversed); }),
                       "max_seq_length of at least 2"));
  reversed.policies.score_each_base_once = true;
  EXPECT_TRUE(
      contains(error_of([&] { Loader(part, dna(), reversed); }), "reverse_complement_prob must be 0"));
  EXPECT_TRUE(contains(error_of([&] { Loader(nullptr, dna(), in_order(8)); }), "without sequences"));
}

}  // namespace
}  // namespace biomoe
