// Settings and files that cannot work: each is refused in one line, before anything is written.
#include "biomoe/core/file.h"
#include "tests/cli/cli_test_util.h"

namespace biomoe::test {
namespace {

namespace fs = std::filesystem;

class BadInput : public CliTest {
 protected:
  // Training is refused with `parts` in the message, and leaves no run folder.
  void refuses(std::vector<std::string> overrides, const std::vector<std::string>& parts) const {
    SCOPED_TRACE(::testing::PrintToString(overrides));
    const auto before = listing(folder_.path());
    expect_error(train("run", std::move(overrides)), 2, parts);
    EXPECT_EQ(listing(folder_.path()), before);
  }
};

TEST_F(BadInput, NumbersOutOfRangeNameTheirKey) {
  for (const char* key : {"num_train_steps",
                          "grad_acc_steps",
                          "num_threads",
                          "recompute_layers",
                          "seed",
                          "dataset.max_seq_length",
                          "dataset.token_micro_batch_size",
                          "dataset.stride",
                          "dataset.num_workers",
                          "dataset.n_run_length",
                          "config_kwargs.vocab_size",
                          "config_kwargs.hidden_size",
                          "config_kwargs.intermediate_size",
                          "config_kwargs.num_hidden_layers",
                          "config_kwargs.num_attention_heads",
                          "config_kwargs.num_key_value_heads",
                          "config_kwargs.head_dim",
                          "config_kwargs.num_local_experts",
                          "config_kwargs.num_experts_per_tok",
                          "config_kwargs.max_position_embeddings",
                          "config_kwargs.sliding_window",
                          "checkpoint.save_every_n_steps",
                          "checkpoint.max_checkpoints",
                          "logger.frequency",
                          "validation.every_n_steps",
                          "validation.max_batches",
                          "lr_scheduler_kwargs.num_warmup_steps"}) {
    const std::string name(key);
    const std::string last = name.substr(name.find('.') + 1);
    for (const char* value :
         {"1e30", "-1", "-9223372036854775808", "99999999999999999999", "1.5", "abc", "null"}) {
      // null stands for "not set" where a key allows it.
      if (std::string(value) == "null" && (last == "head_dim" || last == "sliding_window")) continue;
      refuses({name + "=" + value}, {last});
    }
  }
  for (const char* key :
       {"max_grad_norm", "adamw_kwargs.lr", "adamw_kwargs.eps", "adamw_kwargs.weight_decay",
        "dataset.validation_fraction", "dataset.soft_masked_weight", "dataset.reverse_complement_prob",
        "config_kwargs.rms_norm_eps", "config_kwargs.rope_theta", "config_kwargs.router_aux_loss_coef",
        "config_kwargs.initializer_range", "lr_scheduler_kwargs.min_lr_ratio"}) {
    const std::string name(key);
    for (const char* value : {"-1", "nan", "inf", "1e999", "x"}) {
      refuses({name + "=" + value}, {name.substr(name.find('.') + 1)});
    }
  }
}

TEST_F(BadInput, WhatCannotBeMeantIsRefused) {
  refuses({"num_train_steps=1e400"}, {"num_train_steps", "write digits only"});
  refuses({"fp8_config.enabled="}, {"fp8_config.enabled", "nothing is given"});
  refuses({"config_kwargs.rms_norm_eps=1e300"}, {"rms_norm_eps", "above 1"});
  refuses({"config_kwargs.initializer_range=99999999999"}, {"initializer_range", "above 100"});
  refuses({"seed=1", "dataset.shuffle_seed=1", "seed=2"}, {"'seed=2'", "given twice", "'seed=1'"});
  refuses({"dataset.path=[" + path("genome.fa") + ", " + path("genome.fa") + "]"}, {"named twice"});
  refuses({"dataset.validation_fraction=0", "dataset.validation_path=" + path("genome.fa")},
          {"dataset.validation_path", "genome.fa"});
  write("two.jsonl", "{\"text\": \"ACGT\", \"text\": \"GGGG\"}\n");
  refuses({"dataset.path=" + path("two.jsonl")}, {"two.jsonl:1", "\"text\" is given twice"});
  // A name that is not UTF-8, from the command line and through a pattern.
  write("latin_\xe9.fa", ">a\nACGT\n");
  refuses({"dataset.path=" + path("latin_\xe9.fa")}, {"latin_?.fa", "UTF-8"});
  refuses({"dataset.path=" + path("latin_*.fa")}, {"latin_?.fa", "UTF-8"});
  expect_error(run({"data", "inspect", path("latin_\xe9.fa")}), 2, {"latin_?.fa", "UTF-8"});
  expect_error(run({"data", "inspect", path("latin_*.fa")}), 2, {"latin_?.fa", "UTF-8"});
}

TEST_F(BadInput, LargeSizesAreRefusedByTheirMemory) {
  refuses({"config_kwargs.hidden_size=1048576"}, {"bytes of memory"});
  refuses({"config_kwargs.hidden_size=1048576", "config_kwargs.intermediate_size=1048576",
           "config_kwargs.num_local_experts=4096", "config_kwargs.num_hidden_layers=4096",
           "config_kwargs.vocab_size=16777216"},
          {});
  refuses({"dataset.token_micro_batch_size=2147483647"}, {"bytes of memory", "token_micro_batch_size"});
  refuses({"dataset.token_micro_batch_size=2147483647", "grad_acc_steps=1048576"}, {"bytes of memory"});
  refuses({"dataset.max_seq_length=2147483647", "dataset.token_micro_batch_size=2147483647",
           "config_kwargs.max_position_embeddings=2147483648"},
          {"bytes of memory"});
}

TEST_F(BadInput, SettingsAtOddsWithEachOther) {
  refuses({"config_kwargs.num_local_experts=0"}, {"num_local_experts"});
  refuses({"config_kwargs.num_experts_per_tok=5"}, {"num_experts_per_tok=5", "num_local_experts=4"});
  refuses({"config_kwargs.head_dim=7"}, {"7"});
  refuses({"config_kwargs.num_attention_heads=3"}, {"num_attention_heads=3"});
  refuses({"config_kwargs.num_key_value_heads=3"}, {"num_key_value_heads=3"});
  refuses({"dataset.token_micro_batch_size=32"}, {"token_micro_batch_size=32", "max_seq_length=64"});
  refuses({"dataset.stride=64"}, {"stride=64"});
  refuses({"config_kwargs.max_position_embeddings=32"}, {"max_position_embeddings=32"});
  refuses({"config_kwargs.vocab_size=3"}, {"vocab_size=3"});
  refuses({"recompute_layers=3"}, {"recompute_layers=3"});
  refuses({"parallelism.dp_size=9223372036854775807"}, {"dp_size=9223372036854775807"});
  refuses({"parallelism.ep_size=2", "parallelism.dp_size=2000000000"}, {"dp_size=2000000000"});
  refuses({"device=cuda"}, {"device", "cuda"});
  refuses({"adamw_kwargs.betas=[0.9]"}, {"betas"});
  refuses({"adamw_kwargs.betas=[0.9, 1.0]"}, {"betas"});
  refuses({"dataset.tokenizer_name_or_path=no_such"}, {"no_such"});
  refuses({"config_name_or_path=no_such"}, {"no_such"});
  refuses({"init_from=no_such"}, {"no_such"});
  refuses({"run_dir="}, {"run_dir"});
}

TEST_F(BadInput, TheSmallestSettingsTrain) {
  for (const std::vector<std::string>& overrides :
       {std::vector<std::string>{"dataset.max_seq_length=1", "dataset.token_micro_batch_size=1"},
        std::vector<std::string>{"dataset.max_seq_length=2", "dataset.token_micro_batch_size=3"},
        std::vector<std::string>{"num_train_steps=0"},
        std::vector<std::string>{"config_kwargs.num_local_experts=1", "config_kwargs.num_experts_per_tok=1"},
        std::vector<std::string>{"config_kwargs.hidden_size=4", "config_kwargs.intermediate_size=1",
                                 "config_kwargs.head_dim=2"}}) {
    SCOPED_TRACE(::testing::PrintToString(overrides));
    auto with_validation = overrides;
    with_validation.emplace_back("validation.max_batches=1");
    with_validation.emplace_back("dataset.validation_fraction=0.01");
    fs::remove_all(path("run"));
    const Outcome outcome = train("run", with_validation);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
  }
}

TEST_F(BadInput, FilesThatHoldNoSequences) {
  const std::string gzip = read_file(BIOMOE_TEST_DATA "/data_cases/fasta/plain_gzip.fa.gz");
  write("cut.fa.gz", gzip.substr(0, gzip.size() / 2));
  write("empty.fa", "");
  write("blank.fa", "\n\n\n");
  write("headers.fa", ">a\n>b\n");
  write("all_n.fa", ">a\n" + std::string(5000, 'N') + "\n");
  std::string bytes;
  for (int i = 0; i < 4096; ++i) bytes += static_cast<char>(i * 37 + i / 256);
  write("binary.fa", bytes);
  write("binary_after_header.fa", ">a\n" + bytes);
  write("broken.jsonl", "{\"text\": \"ACGT\"}\n{\"text\": \n");
  write("no_column.jsonl", "{\"sequence\": \"ACGT\"}\n");
  fs::create_directory(path("folder"));
  for (const char* name :
       {"no_such.fa", "cut.fa.gz", "empty.fa", "blank.fa", "headers.fa", "all_n.fa", "binary.fa",
        "binary_after_header.fa", "broken.jsonl", "no_column.jsonl", "folder"}) {
    refuses({"dataset.path=" + path(name)}, {name});
    refuses({"dataset.validation_path=" + path(name), "dataset.validation_fraction=0"}, {name});
  }
  refuses({"dataset.path=" + write("masked.fa", ">a\nNNNN\n"), "dataset.add_eos=false",
           "dataset.validation_fraction=0"},
          {"masked.fa: no token of a sequence counts in the loss", "dataset.mask_degenerate_bases"});
  refuses({"dataset.path=" + path("folder") + "/*.fa"}, {"matches no file"});
  refuses({"dataset.path=[]"}, {"dataset.path"});
}

TEST_F(BadInput, AFolderThatCannotBeWrittenIsRefused) {
  write("file", "text");
  expect_error(train("file"), 2, {"file"});
  expect_error(train("file/below"), 2, {"file"});
  expect_error(train("/proc/biomoe"), 2, {"/proc/biomoe"});
  expect_error(train(std::string(300, 'x')), 2, {"xxx"});
  if (geteuid() == 0) return;  // who may write everywhere
  fs::create_directory(path("locked"));
  fs::permissions(path("locked"), fs::perms::owner_read | fs::perms::owner_exec);
  expect_error(train("locked/run"), 2, {"locked"});
}

TEST_F(BadInput, WhatIsNoCheckpointIsRefusedByEachReader) {
  fs::create_directories(path("nothing"));
  write("text/config.json", "{");
  write("array/config.json", "[]");
  write("other/config.json", "{\"model_type\": \"llama\"}");
  write("garbage/checkpoints/step_3/state.json", std::string("\x00\x01\x02", 3));
  write("garbage/checkpoints/latest", "step_3\n");
  write("pointer/checkpoints/latest", std::string(1 << 20, 'x'));
  write("file", "text");
  for (const char* name : {"no_such", "nothing", "text", "array", "other", "garbage", "pointer", "file"}) {
    SCOPED_TRACE(name);
    const auto before = listing(folder_.path());
    for (const std::vector<std::string>& words :
         {std::vector<std::string>{"eval", "--data", path("genome.fa"), "--checkpoint", path(name)},
          {"generate", "--checkpoint", path(name)},
          {"checkpoint", "export", path(name), path("out")},
          {"checkpoint", "import", path(name), path("out")},
          {"checkpoint", "inspect", path(name)}}) {
      SCOPED_TRACE(words.front() + " " + words[1]);
      const Outcome outcome = run(words);
      EXPECT_EQ(outcome.status, 2) << outcome.err;
      EXPECT_EQ(outcome.out, "");
      // What is passed over is noted on a line of its own before.
      const std::string last = outcome.err.substr(outcome.err.rfind('\n', outcome.err.size() - 2) + 1);
      EXPECT_THAT(last, ::testing::StartsWith("biomoe: "));
    }
    EXPECT_EQ(run({"checkpoint", "verify", path(name)}).status, 2);
    EXPECT_EQ(listing(folder_.path()), before);
  }
}

TEST_F(BadInput, OptionsOfATrainedModelOutOfRange) {
  ASSERT_EQ(train("run", {"num_train_steps=1"}).status, 0);
  const std::vector<std::string> generate{"generate", "--checkpoint", path("run"), "--prompt"};
  const auto refused = [&](std::vector<std::string> more, const std::vector<std::string>& parts) {
    SCOPED_TRACE(::testing::PrintToString(more));
    auto words = generate;
    words.insert(words.end(), more.begin(), more.end());
    expect_error(run(words), 2, parts);
  };
  refused({std::string(5000, 'A')}, {"prompt"});
  refused({"ACGXT"}, {"'X'", "the vocabulary dna", "it has A B C D G"});
  refused({"ACGT", "--temperature", "inf"}, {"--temperature", "not a finite number"});
  refused({"ACGT", "--temperature", "-1"}, {"temperature"});
  refused({"ACGT", "--temperature", "nan"}, {"temperature"});
  refused({"ACGT", "--top-p", "0"}, {"top-p"});
  refused({"ACGT", "--top-k", "-1"}, {"top-k"});
  refused({"ACGT", "--max-new-tokens", "-1"}, {"max-new-tokens"});
  refused({"ACGT", "--max-new-tokens", "99999999999999999999"}, {"--max-new-tokens", "64 bits"});
  refused({"ACGT", "--max-seq-length", "0"}, {"--max-seq-length", "0 is below 1"});
  refused({"ACGT", "--max-seq-length", "-1"}, {"--max-seq-length", "-1 is below 1"});
  refused({"ACGT", "--seed", "-1"}, {"--seed", "-1 is below 0"});
  refused({"ACGT", "--seed", "18446744073709551616"}, {"--seed", "64 bits"});
  refused({"ACGT", "--threads", "-1"}, {"-1"});
  refused({"ACGT", "--threads", "100000000"}, {"100000000"});
  const std::vector<std::string> eval{"eval", "--checkpoint", path("run"), "--data", path("genome.fa")};
  const auto not_evaluated = [&](std::vector<std::string> more, const std::vector<std::string>& parts) {
    SCOPED_TRACE(::testing::PrintToString(more));
    auto words = eval;
    words.insert(words.end(), more.begin(), more.end());
    expect_error(run(words), 2, parts);
  };
  not_evaluated({"--max-seq-length", "-5"}, {"-5"});
  not_evaluated({"--max-seq-length", "0"}, {"--max-seq-length", "0 is below 1"});
  not_evaluated({"--holdout-fraction", "nan"}, {"--holdout-fraction", "not a finite number"});
  not_evaluated({"--json", path("genome.fa")}, {"genome.fa", "an input"});
  not_evaluated({"--json", path("run/checkpoints/step_1/model.safetensors")}, {"an input"});
  not_evaluated({"--data", path("genome.fa")}, {"genome.fa", "named twice"});
  not_evaluated({"--max-seq-length", "1000000000"}, {"1000000000"});
  not_evaluated({"--stride", "64"}, {"stride"});
  not_evaluated({"--stride", "-5"}, {"stride"});
  not_evaluated({"--markov", "99", "--holdout-fraction", "0.1"}, {"99"});
  not_evaluated({"--markov", "-1", "--holdout-fraction", "0.1"}, {"-1"});
  not_evaluated({"--markov", "2"}, {"--holdout-fraction"});
  not_evaluated({"--json", path("no_such/eval.json")}, {"no_such"});
  for (const char* size : {"0", "-1", "1e9", "5XB", "", "99999999999999999999GB"}) {
    expect_error(run({"checkpoint", "export", path("run"), path("hf"), "--max-shard-size", size}), 2, {});
  }
  expect_error(run({"checkpoint", "export", path("run"), path("hf"), "--dtype", "int8"}), 2, {"int8"});
  EXPECT_FALSE(fs::exists(path("hf")));
  ASSERT_EQ(run({"checkpoint", "export", path("run"), path("nan")}).status, 0);
  std::string weights = read_file(path("nan/model.safetensors"));
  weights.replace(weights.size() - 4, 4, "\xff\xff\xff\x7f");  // of the last value
  write_file_synced(path("nan/model.safetensors"), weights);
  expect_error(run({"checkpoint", "import", path("nan"), path("back")}), 2, {"nan", "not finite"});
  EXPECT_FALSE(fs::exists(path("back")));
  ASSERT_EQ(run({"checkpoint", "export", path("run"), path("full")}).status, 0);
  expect_error(run({"checkpoint", "export", path("run"), path("full")}), 2, {"full", "--overwrite"});
}

TEST_F(BadInput, BenchSizesOutOfRange) {
  for (const std::vector<std::string>& words :
       std::vector<std::vector<std::string>>{{"--seq", "0"},
                                             {"--batch", "-1"},
                                             {"--steps", "0"},
                                             {"--hidden", "0"},
                                             {"--top-k", "9"},
                                             {"--heads", "3"},
                                             {"--layers", "-1"},
                                             {"--vocab", "0"},
                                             {"--cuda-graph", "7"},
                                             {"--shard-parameters", "2"},
                                             {"--threads", "-2"}}) {
    SCOPED_TRACE(words.front());
    std::vector<std::string> all{"bench", "step", "--steps", "1", "--warmup", "0",
                                 "--seq", "16",   "--batch", "1", "--layers", "1"};
    for (size_t i = 0; i + 1 < all.size(); ++i) {
      if (all[i] == words[0])
        all.erase(all.begin() + static_cast<int64_t>(i), all.begin() + static_cast<int64_t>(i) + 2);
    }
    all.insert(all.end(), words.begin(), words.end());
    expect_error(run(all), 2, {});
  }
}

}  // namespace
}  // namespace biomoe::test
