// What the parity tests share: the golden folders, their tensors, and where a checkpoint's tensor lies in
// ours.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <regex>
#include <string>
#include <vector>

#include "biomoe/checkpoint/hf_config.h"
#include "biomoe/checkpoint/safetensors.h"
#include "biomoe/data/batch.h"
#include "biomoe/model/model.h"
#include "biomoe/model/parameters.h"
#include "biomoe/ops/device.h"

namespace biomoe::test {

namespace fs = std::filesystem;

inline std::vector<fs::path> golden_folders() {
  const char* from_environment = std::getenv("BIOMOE_HF_GOLDENS");
  const fs::path root =
      from_environment ? fs::path(from_environment) : fs::path(BIOMOE_TEST_DATA) / "goldens/hf";
  std::vector<fs::path> folders;
  std::error_code error;  // a folder that cannot be read leaves none, which CasesAreThere reports
  for (const auto& entry : fs::directory_iterator(root, error)) {
    if (fs::exists(entry.path() / "golden.safetensors")) folders.push_back(entry.path());
  }
  std::sort(folders.begin(), folders.end());
  return folders;
}

inline std::vector<float> read_values(const SafetensorsFile& file, const std::string& name) {
  const SafetensorsEntry& entry = file.at(name);
  std::vector<float> values(static_cast<size_t>(entry.num_elements()));
  file.read_f32(entry, values.data());
  return values;
}

// The part of our parameters that a checkpoint's tensor of this name holds.
struct Slice {
  const ParamSpec* spec = nullptr;
  int64_t offset = 0;  // elements from the start of the parameter
};

inline Slice slice_of(const ParameterList& parameters, const ModelConfig& config, const std::string& name) {
  static const std::regex expert(
      R"((model\.layers\.\d+)\.block_sparse_moe\.experts\.(\d+)\.w([123])\.weight)");
  std::smatch match;
  const int64_t D = config.hidden_size, F = config.intermediate_size;
  if (std::regex_match(name, match, expert)) {
    const int64_t e = std::stoll(match[2]);
    if (match[3] == "2") return {&parameters.find(match[1].str() + ".mlp.experts.down_proj"), e * D * F};
    const int64_t half = match[3] == "3" ? 1 : 0;
    return {&parameters.find(match[1].str() + ".mlp.experts.gate_up_proj"), (2 * e + half) * F * D};
  }
  if (name == "lm_head.weight" && config.tie_word_embeddings)
    return {&parameters.find("model.embed_tokens.weight"), 0};
  return {&parameters.find(std::regex_replace(name, std::regex("block_sparse_moe.gate"), "mlp.gate")), 0};
}

inline double relative_error(const float* got, const std::vector<float>& want) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double d = static_cast<double>(got[i]) - static_cast<double>(want[i]);
    difference += d * d;
    norm += static_cast<double>(want[i]) * static_cast<double>(want[i]);
  }
  return norm == 0 ? std::sqrt(difference) : std::sqrt(difference / norm);
}

// Input ids [B, S] as one packed batch; the last token of a row has no target.
inline Batch batch_of(const SafetensorsFile& golden) {
  const SafetensorsEntry& entry = golden.at("input_ids");
  std::vector<int64_t> ids(static_cast<size_t>(entry.num_elements()));
  golden.read(entry, ids.data());
  const int64_t rows = entry.shape[0], length = entry.shape[1];
  Batch batch;
  for (int64_t i = 0; i < rows * length; ++i) {
    const bool last = (i + 1) % length == 0;
    batch.tokens.push_back(static_cast<int32_t>(ids[static_cast<size_t>(i)]));
    batch.targets.push_back(last ? kIgnoreTarget : static_cast<int32_t>(ids[static_cast<size_t>(i) + 1]));
    batch.loss_weights.push_back(last ? 0.0f : 1.0f);
    batch.positions.push_back(static_cast<int32_t>(i % length));
    if (last) batch.cu_seqlens.push_back(static_cast<int32_t>(i + 1));
  }
  batch.valid_targets = rows * (length - 1);
  batch.target_weight = static_cast<double>(batch.valid_targets);
  return batch;
}

struct Losses {
  double lm = 0, aux = 0;
};

// Forward, loss and backward over the batch, with poisoned activations, as a training step runs them.
inline Losses forward_backward(Model& model, const Batch& batch) {
  model.poison_activations();
  const double scale = 1.0 / batch.target_weight, coef = model.config().router_aux_loss_coef;
  model.start_step(scale);
  model.reset_sums();
  const DeviceBatch& views = model.upload(batch);
  model.forward(views);
  model.loss(views, true);
  model.backward(views, coef, 0.0);
  model.finish_step(coef);
  device_wait_sync(model.context());
  const StepSums sums = model.sums();
  return {.lm = sums.loss.weighted_nll * scale, .aux = sums.balance_loss};
}

// The name of a golden folder as gtest takes it.
inline std::string case_name(const fs::path& folder) {
  return std::regex_replace(folder.filename().string(), std::regex("[^A-Za-z0-9]"), "_");
}

}  // namespace biomoe::test
