#include "biomoe/data/dataset.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "biomoe/core/error.h"
#include "tests/unit/data/data_test_helpers.h"

namespace biomoe {
namespace {

using test::contains;
using test::error_of;
using test::TempFolder;

DataConfig config_for(const std::string& path) {
  DataConfig config;
  config.path = {path};
  config.tokenizer_name_or_path = "dna";
  config.max_seq_length = 8;
  config.token_micro_batch_size = 16;
  config.n_run_length = 4;
  return config;
}

TEST(Dataset, OpensSplitsAndCounts) {
  const TempFolder folder;
  folder.write("b.fa", ">r1\nACGTNNNNNACRt\n>r2\n\n");
  folder.write("a.jsonl", "{\"text\":\"ACGUAC\"}\n");
  DataConfig config = config_for((folder.path() / "*").string());
  config.validation_fraction = 0.25;
  const Dataset data = open_dataset(config);
  const DataReport& report = data.report;
  ASSERT_EQ(report.files.size(), 2u);
  EXPECT_TRUE(report.files[0].path.ends_with("a.jsonl"));  // name order
  EXPECT_EQ(report.files[0].format, SequenceFormat::kJsonl);
  EXPECT_EQ(report.files[1].records, 2);
  EXPECT_EQ(report.files[1].bases, 13);
  EXPECT_EQ(report.records, 3);
  EXPECT_EQ(report.bases, 19);
  EXPECT_EQ(report.degenerate, 6);
  EXPECT_EQ(report.soft_masked, 1);
  EXPECT_EQ(report.rna_bases, 1);
  EXPECT_EQ(report.n_runs.runs, 1);
  EXPECT_EQ(report.n_runs.bases, 5);
  EXPECT_EQ(report.train.bases, 10);  // 14 of 19 bases, of which 4 in the N run
  EXPECT_EQ(report.validation.bases, 4);
  EXPECT_EQ(report.train.windows, 2);
  EXPECT_EQ(data.train->windows.num_windows(), 2);
  EXPECT_EQ(data.validation->store, data.train->store);
  EXPECT_TRUE(contains(report.text(), "5 N in 1 runs split out"));
  EXPECT_TRUE(contains(report.text(), "warning: record 'r2' is empty"));
  EXPECT_EQ(report.json()["train"]["bases"], 10);
  EXPECT_EQ(report.json()["files"][0]["format"], "JSONL");

  Batch batch;
  Loader loader(data.validation, data.vocabulary, validation_loader_options(config));
  ASSERT_TRUE(loader.next(batch));
  EXPECT_EQ(batch.tokens, (std::vector<int32_t>{4, 5, 8, 7}));  // ACRt, after the N run: no BOS
  EXPECT_EQ(batch.targets, (std::vector<int32_t>{5, kIgnoreTarget, 7, 0}));
  EXPECT_FALSE(loader.next(batch));
}

TEST(Dataset, ValidationMayHaveFilesOfItsOwn) {
  const TempFolder folder;
  DataConfig config = config_for(folder.write("t.fa", ">a\nACGT\n"));
  EXPECT_EQ(open_dataset(config).validation, nullptr);
  config.validation_path = {folder.write("v.fq", "@v\nGG\n+\nII\n")};
  const Dataset data = open_dataset(config);
  EXPECT_EQ(data.report.train.bases, 4);
  EXPECT_EQ(data.report.validation.bases, 2);
  EXPECT_EQ(data.validation->store->name(0), "v");
}

TEST(Dataset, EvaluationOpensAnythingWhole) {
  const TempFolder folder;
  const DataConfig policies = config_for("unused");
  DataReport report;
  const Vocabulary vocabulary = Vocabulary::dna();
  const auto part =
      open_sequences({folder.write("e.fa", ">one\nACGTACGTACGT\n>two\nAC\n")}, policies, vocabulary, &report);
  EXPECT_EQ(report.train.windows, 3);
  Loader loader(part, vocabulary, validation_loader_options(policies));
  Batch batch;
  std::vector<SequenceSource> sources;
  std::vector<int64_t> targets(2, 0);
  while (loader.next(batch, &sources))
    for (size_t b = 0; b < sources.size(); ++b)
      for (int32_t i = batch.cu_seqlens[b]; i < batch.cu_seqlens[b + 1]; ++i)
        targets[static_cast<size_t>(sources[b].record)] += batch.targets[static_cast<size_t>(i)] > 3;
  EXPECT_EQ(targets, (std::vector<int64_t>{12, 2}));
  EXPECT_TRUE(contains(error_of([&] { open_sequences({}, policies, vocabulary); }), "no path"));
}

TEST(Dataset, NInProteinIsAsparagine) {
  const TempFolder folder;
  DataConfig config = config_for(folder.write("p.fa", ">p\nMKNNNNNNNNKL\n"));
  config.tokenizer_name_or_path = "protein";
  const Dataset data = open_dataset(config);
  EXPECT_EQ(data.report.n_runs.runs, 0);
  EXPECT_EQ(data.report.train.bases, 12);
  EXPECT_EQ(data.report.degenerate, 0);
  config.reverse_complement_prob = 0.5;
  EXPECT_TRUE(contains(error_of([&] { open_dataset(config); }), "no reverse complement"));
}

TEST(Dataset, SaysWhyItCannotTrain) {
  const TempFolder folder;
  const std::string good = folder.write("g.fa", ">a\nACGT\n");
  const auto message = [](const DataConfig& config) {
    ErrorKind kind = ErrorKind::kFailure;
    const std::string text = error_of([&] { open_dataset(config); }, &kind);
    EXPECT_EQ(kind, ErrorKind::kUser) << text;
    EXPECT_EQ(text.find('\n'), std::string::npos) << text;
    return text;
  };
  EXPECT_TRUE(contains(message(config_for(folder.write("e.fa", ">a\n>b\n"))), "e.fa: no base to train on"));
  EXPECT_TRUE(contains(message(config_for(folder.write("n.fa", ">a\nNNNNNN\n"))), "no base to train on"));
  EXPECT_TRUE(contains(message(config_for((folder.path() / "*.fasta").string())), "matches no file"));
  EXPECT_TRUE(contains(message(config_for(folder.path().string())), "a directory"));
  EXPECT_TRUE(contains(message(DataConfig()), "dataset.path is empty"));
  DataConfig tiny = config_for(good);
  tiny.validation_fraction = 1e-9;
  EXPECT_TRUE(contains(message(tiny), "holds out no base"));
  DataConfig tokenizer = config_for(folder.write("star.fa", ">s1\nACGT\n>s2\nAC*GT\n"));
  tokenizer.tokenizer_name_or_path =
      folder.write("tokenizer.json",
                   R"({"model": {"type": "WordLevel", "vocab": {"A": 0, "C": 1, "G": 2, "T": 3, "<s>": 4}},
                            "added_tokens": [{"id": 4, "content": "<s>"}]})");
  EXPECT_TRUE(contains(message(tokenizer), "record 's2', base 3: the vocabulary"));
}

TEST(Dataset, SaysThatNothingCountsInTheLoss) {
  const TempFolder folder;
  DataConfig config = config_for(folder.write("n.fa", ">a\nNNNN\n>b\nRYNN\n"));
  config.add_eos = false;
  const Dataset masked = open_dataset(config);
  const std::string message = error_of([&] { require_targets(masked, config); });
  EXPECT_TRUE(contains(message, "n.fa: no token of a sequence counts in the loss")) << message;
  EXPECT_TRUE(contains(message, "dataset.mask_degenerate_bases")) << message;
  config.mask_degenerate_bases = false;
  EXPECT_EQ(error_of([&] { require_targets(masked, config); }), "");
  config.mask_degenerate_bases = true;
  config.path = {folder.write("one.fa", ">a\nNNNN\n>b\nNNA\n")};
  const Dataset one = open_dataset(config);
  EXPECT_EQ(error_of([&] { require_targets(one, config); }), "");
}

TEST(Dataset, EveryKeyIsChecked) {
  const auto message = [](auto change) {
    DataConfig config = config_for("x.fa");
    change(config);
    return error_of([&] { validate_data_config(config); });
  };
  EXPECT_EQ(message([](DataConfig&) {}), "");
  EXPECT_TRUE(contains(message([](auto& c) { c.path = {""}; }), "a path is empty"));
  for (const double bad : {-0.1, 1.0, 2.0, std::numeric_limits<double>::quiet_NaN()})
    EXPECT_TRUE(
        contains(message([&](auto& c) { c.validation_fraction = bad; }), "dataset.validation_fraction="));
  EXPECT_TRUE(contains(message([](auto& c) {
                         c.validation_path = {"v.fa"};
                         c.validation_fraction = 0.1;
                       }),
                       "not both"));
  EXPECT_TRUE(contains(message([](auto& c) { c.text_column = ""; }), "dataset.text_column="));
  EXPECT_TRUE(
      contains(message([](auto& c) { c.tokenizer_name_or_path = ""; }), "dataset.tokenizer_name_or_path="));
  EXPECT_TRUE(contains(message([](auto& c) { c.max_seq_length = 0; }), "dataset.max_seq_length=0"));
  EXPECT_TRUE(contains(message([](auto& c) { c.stride = 8; }), "dataset.stride=8"));
  EXPECT_TRUE(contains(message([](auto& c) { c.stride = -1; }), "dataset.stride=-1"));
  EXPECT_TRUE(
      contains(message([](auto& c) { c.token_micro_batch_size = 7; }), "dataset.token_micro_batch_size=7"));
  EXPECT_TRUE(
      contains(message([](auto& c) { c.token_micro_batch_size = int64_t{1} << 31; }), "must be at most"));
  EXPECT_TRUE(contains(message([](auto& c) { c.num_workers = -1; }), "dataset.num_workers=-1"));
  EXPECT_TRUE(
      contains(message([](auto& c) { c.soft_masked_weight = 1.5; }), "dataset.soft_masked_weight=1.5"));
  EXPECT_TRUE(contains(message([](auto& c) { c.n_run_length = 0; }), "dataset.n_run_length=0"));
  EXPECT_TRUE(
      contains(message([](auto& c) { c.reverse_complement_prob = -1; }), "dataset.reverse_complement_prob="));
}

TEST(Dataset, ReportsStayShort) {
  const TempFolder folder;
  for (int i = 0; i < 30; ++i)
    folder.write(fmt::format("{:02}.fa", i), fmt::format(">r{}\nAC\n>empty{}\n", i, i));
  const Dataset data = open_dataset(config_for((folder.path() / "[0-9]*.fa").string()));
  EXPECT_EQ(data.report.files.size(), 30u);
  const std::string text = data.report.text();
  EXPECT_LE(std::count(text.begin(), text.end(), '\n'), 45);
  EXPECT_TRUE(contains(text, "... and 20 more files"));
}

TEST(Dataset, AFileIsReadOnce) {
  const TempFolder folder;
  const std::string file = folder.write("a.fa", ">a\nACGTACGT\n");
  const std::string link = (folder.path() / "link.fa").string();
  std::filesystem::create_symlink(file, link);
  DataConfig config = config_for(file);
  config.path.push_back(link);
  EXPECT_TRUE(contains(error_of([&] { open_dataset(config); }), "link.fa: the same file is named twice"));
  config = config_for(file);
  config.validation_path = {link};
  EXPECT_TRUE(contains(error_of([&] { open_dataset(config); }), "link.fa is in dataset.path too"));
}

TEST(ExpandPaths, AFileWhoseNameLooksLikeAPatternIsAFile) {
  const TempFolder folder;
  const std::string odd = folder.write("x[1].fa", ">a\nAC\n");
  folder.write("x1.fa", ">b\nAC\n");
  EXPECT_EQ(expand_paths({odd}), std::vector<std::string>{odd});
  EXPECT_EQ(expand_paths({(folder.path() / "x*").string()}).size(), 2u);
}

}  // namespace
}  // namespace biomoe
