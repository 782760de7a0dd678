// What the tests of training share: a tiny run on a FASTA file of the test's own, and what it leaves.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "biomoe/core/clock.h"
#include "biomoe/core/error.h"
#include "biomoe/core/file.h"
#include "biomoe/core/rng.h"
#include "biomoe/train/trainer.h"
#include "tests/test_folder.h"

namespace biomoe::test {

// Random bases with a period of 7 in most places, so that there is something to learn.
inline std::string random_bases(int64_t count, uint64_t seed) {
  const Rng rng(seed, RngStream::kTest);
  std::string bases;
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t draw = rng.u64(static_cast<uint64_t>(i));
    const bool repeat = i >= 7 && draw % 5 != 0;
    bases += repeat ? bases[static_cast<size_t>(i) - 7] : "ACGT"[draw / 5 % 4];
  }
  return bases;
}

// 16 windows of up to 32 tokens, two in a micro-batch and four in a step: an epoch is about four steps.
inline RunConfig tiny_run(const TempFolder& folder) {
  RunConfig config;
  config.run_dir = (folder / "run").string();
  config.model.hidden_size = 16;
  config.model.intermediate_size = 24;
  config.model.num_hidden_layers = 2;
  config.model.num_attention_heads = 2;
  config.model.num_key_value_heads = 1;
  config.model.num_local_experts = 4;
  config.model.max_position_embeddings = 64;
  config.model.initializer_range = 0.1;
  config.num_train_steps = 7;
  config.grad_acc_steps = 2;
  config.seed = 5;
  config.num_threads = 2;
  config.device = DeviceChoice::kCpu;
  config.poison_activations = true;
  config.dataset.path = {folder.write(
      "train.fa", ">a\n" + random_bases(280, 1) + "\n>b\nACGTNNACg\n>c\n" + random_bases(200, 2) + "\n")};
  config.dataset.tokenizer_name_or_path = "dna";
  config.dataset.max_seq_length = 32;
  config.dataset.token_micro_batch_size = 64;
  config.dataset.reverse_complement_prob = 0.5;
  config.schedule.num_warmup_steps = 2;
  config.schedule.num_decay_steps = 20;
  config.checkpoint.async_save = false;
  config.logger.frequency = 1;
  return config;
}

struct RunResult {
  TrainSummary summary;
  std::string output;  // on standard output
};

// What `biomoe train` does with `config`.
inline RunResult train(const RunConfig& config) {
  ::testing::internal::CaptureStdout();
  RunResult result;
  try {
    Trainer trainer({config, {}}, now_seconds());
    result.summary = trainer.run();
  } catch (...) {
    ::testing::internal::GetCapturedStdout();
    throw;
  }
  result.output = ::testing::internal::GetCapturedStdout();
  return result;
}

inline std::filesystem::path step_folder(const RunConfig& config, int64_t step) {
  return std::filesystem::path(config.run_dir) / "checkpoints" / ("step_" + std::to_string(step));
}

// The tensor files of a checkpoint, by name: weights and both moments, and what DelayedScaling keeps.
inline std::map<std::string, std::string> tensor_files(const RunConfig& config, int64_t step) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(step_folder(config, step))) {
    if (entry.path().extension() == ".safetensors")
      files[entry.path().filename().string()] = read_file(entry.path());
  }
  const bool scales = config.fp8_config.enabled && config.fp8_config.fp8_recipe == Fp8Recipe::kDelayedScaling;
  EXPECT_EQ(files.size(), scales ? 4u : 3u);
  return files;
}

// Steps that have a checkpoint, in order.
inline std::vector<int64_t> saved_steps(const RunConfig& config) {
  std::vector<int64_t> steps;
  for (const auto& info : CheckpointStore(std::filesystem::path(config.run_dir) / "checkpoints").list()) {
    steps.push_back(info.step);
  }
  return steps;
}

// The lines of metrics.jsonl without what a clock decides.
inline std::vector<nlohmann::json> metrics(const RunConfig& config) {
  std::vector<nlohmann::json> lines;
  const std::string text = read_file(std::filesystem::path(config.run_dir) / "metrics.jsonl");
  for (size_t begin = 0, end = 0; begin < text.size(); begin = end + 1) {
    end = text.find('\n', begin);
    lines.push_back(nlohmann::json::parse(text.substr(begin, end - begin)));
    for (const char* key : {"tokens_per_s", "tflops", "mfu", "step_ms", "data_ms"}) lines.back().erase(key);
  }
  return lines;
}

inline nlohmann::json summary(const RunConfig& config) {
  return nlohmann::json::parse(read_file(std::filesystem::path(config.run_dir) / "summary.json"));
}

// The message of the error of this kind that `action` throws.
inline std::string message_of(ErrorKind kind, const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error was thrown";
  return {};
}

}  // namespace biomoe::test
