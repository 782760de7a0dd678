// The model against what `transformers` computes for the same checkpoint: every folder of BIOMOE_HF_GOLDENS
// (default: the project's own copies) holds a checkpoint and golden.safetensors with logits, losses,
// gradients and updated weights.
#include <gtest/gtest.h>

#include "biomoe/checkpoint/hf_import.h"
#include "biomoe/model/model.h"
#include "biomoe/optim/optimizer.h"
#include "tests/hf/hf_golden.h"

namespace biomoe {
namespace {

using namespace test;

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
    optimizer.update(model.context(), {.weights_A = model.weights_A(), .gradients_A = model.gradients_A()});
  }
  EXPECT_GE(expect_arena_matches(golden, "adamw3.", model, model.weights_A()), checkpoint_elements);
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(HfParity);
INSTANTIATE_TEST_SUITE_P(Goldens, HfParity, ::testing::ValuesIn(golden_folders()),
                         [](const auto& instance) { return case_name(instance.param); });

}  // namespace
}  // namespace biomoe
