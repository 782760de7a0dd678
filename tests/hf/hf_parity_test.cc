// The model against what `transformers` computes for the same checkpoint: every folder of BIOMOE_HF_GOLDENS
// (default: the project's own copies) holds a checkpoint and golden.safetensors with logits, losses,
// gradients and updated weights.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <regex>

#include "biomoe/checkpoint/hf_config.h"
#include "biomoe/checkpoint/hf_import.h"
#include "biomoe/checkpoint/safetensors.h"
#include "biomoe/model/model.h"
#include "biomoe/optim/optimizer.h"

namespace biomoe {
namespace {

namespace fs = std::filesystem;

std::vector<fs::path> golden_folders() {
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

std::vector<float> read_values(const SafetensorsFile& file, const std::string& name) {
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

Slice slice_of(const ParameterList& parameters, const ModelConfig& config, const std::string& name) {
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

double relative_error(const float* got, const std::vector<float>& want) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double d = static_cast<double>(got[i]) - static_cast<double>(want[i]);
    difference += d * d;
    norm += static_cast<double>(want[i]) * static_cast<double>(want[i]);
  }
  return norm == 0 ? std::sqrt(difference) : std::sqrt(difference / norm);
}

// Every golden tensor PREFIX.NAME against the same place of `arena`; returns how many were compared.
int64_t expect_arena_matches(const SafetensorsFile& golden, const std::string& prefix, const Model& model,
                             TensorView arena) {
  int64_t compared = 0;
  for (const auto& entry : golden.entries()) {
    if (entry.name.rfind(prefix, 0) != 0) continue;
    const Slice slice = slice_of(model.parameters(), model.config(), entry.name.substr(prefix.size()));
    const float* got = arena.f32() + slice.spec->offset + slice.offset;
    const double error = relative_error(got, read_values(golden, entry.name));
    EXPECT_TRUE(error <= 1e-4) << entry.name << ": relative error " << error;
    compared += entry.num_elements();
  }
  return compared;
}

// Input ids [B, S] as one packed batch; the last token of a row has no target.
Batch batch_of(const SafetensorsFile& golden) {
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

Losses forward_backward(Model& model, const Batch& batch) {
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

void expect_router_matches(const SafetensorsFile& golden, const Model& model) {
  const int64_t experts = model.config().num_local_experts;
  for (int64_t layer = 0; layer < model.config().num_hidden_layers; ++layer) {
    const std::vector<float> logits = read_values(golden, "router_logits." + std::to_string(layer));
    const float* probs = model.router_probs(layer).f32();
    for (size_t t = 0; t * static_cast<size_t>(experts) < logits.size(); ++t) {
      const float* row = logits.data() + t * static_cast<size_t>(experts);
      double sum = 0;
      for (int64_t e = 0; e < experts; ++e)
        sum += std::exp(static_cast<double>(row[e]) - static_cast<double>(row[0]));
      for (int64_t e = 0; e < experts; ++e) {
        const double want = std::exp(static_cast<double>(row[e]) - static_cast<double>(row[0])) / sum;
        ASSERT_NEAR(static_cast<double>(probs[static_cast<int64_t>(t) * experts + e]), want, 1e-4)
            << "layer " << layer << " token " << t << " expert " << e;
      }
    }
  }
}

TEST(HfGoldens, CasesAreThere) {
  EXPECT_FALSE(golden_folders().empty());
}

class HfParity : public ::testing::TestWithParam<fs::path> {};

TEST_P(HfParity, LogitsLossesGradientsAndUpdates) {
  const fs::path folder = GetParam();
  const SafetensorsFile golden(folder / "golden.safetensors");
  const Batch batch = batch_of(golden);
  const HfConfig source = read_hf_config(folder);
  Model model(source.model, {.max_tokens = batch.num_tokens(),
                             .max_seqlen = golden.at("input_ids").shape[1],
                             .num_threads = 2,
                             .training = true,
                             // The 16-bit goldens come from a model cast whole, rotary frequencies with it.
                             .rope_frequency_dtype = source.dtype.value_or(DType::kF32)});
  import_hf(folder, source.model, model.parameters(), model.weights_A().f32());
  AdamwConfig adamw;
  adamw.weight_decay = 0.1;
  adamw.decay_norms = true;
  Optimizer optimizer(model.parameters(), adamw);
  const int64_t checkpoint_elements = model.parameters().num_parameters();

  for (int step = 0; step < 3; ++step) {
    const Losses losses = forward_backward(model, batch);
    if (step == 0) {
      Arena arena(static_cast<size_t>(batch.num_tokens() * source.model.vocab_size) * sizeof(float),
                  "logits");
      const TensorView logits = arena.tensor(DType::kF32, {batch.num_tokens(), source.model.vocab_size});
      model.poison_activations();
      model.forward(model.upload(batch), false);
      model.logits_sync(logits);
      const std::vector<float> want = read_values(golden, "logits");
      ASSERT_EQ(static_cast<int64_t>(want.size()), logits.num_elements());
      for (size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(logits.f32()[i], want[i], 1e-4) << "logit " << i;
      expect_router_matches(golden, model);
      EXPECT_NEAR(losses.lm, static_cast<double>(read_values(golden, "lm_loss")[0]), 1e-5);
      EXPECT_NEAR(losses.aux, static_cast<double>(read_values(golden, "aux_loss")[0]), 1e-5);
      EXPECT_NEAR(losses.lm + source.model.router_aux_loss_coef * losses.aux,
                  static_cast<double>(read_values(golden, "loss")[0]), 1e-5);
      EXPECT_GE(expect_arena_matches(golden, "grad.", model, model.gradients_A()), checkpoint_elements);
    }
    optimizer.start_step(model.context(), 1e-2);
    optimizer.clip(model.context(), model.gradients_A(), 1.0);
    optimizer.update(model.context(), model.weights_A(), model.gradients_A());
  }
  EXPECT_GE(expect_arena_matches(golden, "adamw3.", model, model.weights_A()), checkpoint_elements);
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(HfParity);
INSTANTIATE_TEST_SUITE_P(Goldens, HfParity, ::testing::ValuesIn(golden_folders()), [](const auto& instance) {
  return std::regex_replace(instance.param.filename().string(), std::regex("[^A-Za-z0-9]"), "_");
});

}  // namespace
}  // namespace biomoe
