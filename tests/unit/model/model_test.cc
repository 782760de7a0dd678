// Properties that the passes of a model keep however the batch, the memory and the threads are laid out.
#include "biomoe/model/model.h"

#include <gtest/gtest.h>

#include "biomoe/quant/compact_bf16.h"
#include "tests/unit/model/model_test_util.h"

namespace biomoe {
namespace {

using test::accumulate;
using test::logits_of;
using test::random_batch;
using test::small_config;
using test::small_limits;

Model seeded_model(const ModelConfig& config, const ModelLimits& limits, uint64_t seed = 7) {
  Model model(config, limits);
  model.initialize(seed);
  return model;
}

TEST(Model, PackedRecordsGetTheLogitsTheyHaveAlone) {
  for (const bool windowed : {false, true}) {
    ModelConfig config = small_config();
    if (windowed) config.sliding_window = 6;
    Model model = seeded_model(config, small_limits());
    const Batch packed = random_batch(config, {1, 37, 2, 64, 16, 1}, 3);
    model.poison_activations();
    const std::vector<float> together = logits_of(model, packed);
    for (int64_t b = 0; b < packed.num_sequences(); ++b) {
      const Batch alone = test::sequence_of(packed, b);
      model.poison_activations();
      const std::vector<float> want = logits_of(model, alone);
      const auto begin = together.begin() + packed.cu_seqlens[static_cast<size_t>(b)] * config.vocab_size;
      const std::vector<float> got(begin, begin + static_cast<std::ptrdiff_t>(want.size()));
      EXPECT_LE(test::norm_error(got, want), 2e-6) << "record " << b << " windowed " << windowed;
    }
  }
}

TEST(Model, RecomputingLayersChangesNoBit) {
  const ModelConfig config = small_config();
  const Batch batch = random_batch(config, {40, 9, 71}, 5);
  ModelLimits limits = small_limits();
  Model keeps = seeded_model(config, limits);
  const auto want = accumulate(keeps, {batch});
  ASSERT_TRUE(test::all_finite(want.gradients));
  for (const int64_t layers : {int64_t{1}, config.num_hidden_layers}) {
    limits.recompute_layers = layers;
    Model recomputes = seeded_model(config, limits);
    const auto got = accumulate(recomputes, {batch});
    EXPECT_EQ(got.gradients, want.gradients) << layers;
    EXPECT_EQ(got.lm_loss, want.lm_loss);
    EXPECT_EQ(got.aux_loss, want.aux_loss);
  }
}

// One set of activations serves all recomputed layers, so two of them already save memory.
TEST(Model, RecomputingLayersSavesMemory) {
  const ModelConfig config = small_config();
  ModelLimits limits = small_limits();
  const size_t keeps = plan_model_memory(config, limits).saved_activations;
  limits.recompute_layers = 2;
  const size_t two = plan_model_memory(config, limits).saved_activations;
  limits.recompute_layers = 3;
  EXPECT_LT(two, keeps);
  EXPECT_LT(plan_model_memory(config, limits).saved_activations, two);
}

// Between native products that are fused the activation goes on as codes, and is not kept; gate and up are,
// in fewer bits, and what they are made from is scratch, in which the gradient of the activation lies.
TEST(Model, FusedNativeProductsKeepLess) {
  ModelConfig config = small_config();
  config.hidden_size = 128;
  config.intermediate_size = 256;
  ModelLimits limits = small_limits();
  limits.device = Device::kCuda;
  limits.fp8.enabled = true;
  limits.fp8.fp8_recipe = Fp8Recipe::kFloat8BlockScaling;
  const auto spared = [&] {  // by fusing
    limits.expert_ffn_mode = ExpertFfnMode::kGroupedLinear;
    const auto unfused = static_cast<int64_t>(plan_model_memory(config, limits).saved_activations);
    limits.expert_ffn_mode = ExpertFfnMode::kFusedGroupedMlp;
    return unfused - static_cast<int64_t>(plan_model_memory(config, limits).saved_activations);
  };
  const MoeShape shape = moe_shape(config, compute_types(limits.device, config, false));
  const int64_t rows = shape.rows(limits.max_tokens), layers = config.num_hidden_layers;
  const int64_t act = rows * config.intermediate_size * 2, values = 3 * act;
  const int64_t kept = rows * CompactLayout::row_bytes(config.intermediate_size);
  EXPECT_LE(10 * kept, 6 * values);
  EXPECT_EQ(spared(), layers * (values - kept) - act);
  limits.recompute_layers = layers;
  EXPECT_EQ(spared(), values - kept - act);
  config.layer_precision.assign(static_cast<size_t>(layers), "fp8");
  config.layer_precision.back() = "bf16";
  EXPECT_EQ(spared(), -act) << "a layer that needs the values shares what is computed again";
  limits.recompute_layers = 0;
  EXPECT_EQ(spared(), (layers - 1) * (values - kept) - act);
  limits.fp8.fp8_recipe_kwargs.emulate = true;
  EXPECT_EQ(spared(), 0);
  limits.fp8.fp8_recipe_kwargs.emulate = false;
  config.intermediate_size = 192;  // down cannot be native
  EXPECT_EQ(spared(), 0);
}

TEST(Model, ExpertFfnModesAgree) {
  const ModelConfig config = small_config();
  const Batch batch = random_batch(config, {40, 9, 71}, 6);
  ModelLimits limits = small_limits();
  limits.expert_ffn_mode = ExpertFfnMode::kLoop;
  Model loop = seeded_model(config, limits);
  const auto want = accumulate(loop, {batch});
  for (const auto mode : {ExpertFfnMode::kGroupedLinear, ExpertFfnMode::kFusedGroupedMlp}) {
    limits.expert_ffn_mode = mode;
    Model grouped = seeded_model(config, limits);
    const auto got = accumulate(grouped, {batch});
    const double error = test::worst_parameter_error(loop, got.gradients, want.gradients);
    RecordProperty("worst_parameter_error", fmt::format("{:.2e}", error));
    EXPECT_LE(error, 5e-6);
    EXPECT_NEAR(got.lm_loss, want.lm_loss, 1e-6);
  }
}

// No bit depends on what memory held before; and the same seed, threads and batch give the same bits.
TEST(Model, PoisonedActivationsChangeNoBit) {
  const ModelConfig config = small_config();
  const Batch batch = random_batch(config, {33, 12}, 8);
  for (const int threads : {1, 2}) {
    ModelLimits limits = small_limits();
    limits.num_threads = threads;
    Model poisoned = seeded_model(config, limits);
    accumulate(poisoned, {random_batch(config, {500}, 9)});  // leaves other values behind
    const auto want = accumulate(poisoned, {batch});
    Model fresh = seeded_model(config, limits);
    fresh.start_step(1.0 / batch.target_weight);
    fresh.reset_sums();
    const DeviceBatch& views = fresh.upload(batch);
    fresh.forward(views);
    fresh.loss(views, true);
    fresh.backward(views, config.router_aux_loss_coef, config.router_z_loss_coef);
    EXPECT_TRUE(test::all_finite(want.gradients));
    EXPECT_EQ(test::gradients_of(fresh), want.gradients) << threads << " threads";
  }
}

// A softmax over one key is constant. Rounding left in its gradient would become a full step under AdamW,
// which divides by the gradient's size.
TEST(Model, QueriesThatSeeOneKeyGiveQueryAndKeyWeightsNoGradient) {
  ModelConfig config = small_config();
  const Batch ones = random_batch(config, std::vector<int64_t>(40, 1), 17);
  config.sliding_window = 1;
  Model model = seeded_model(config, small_limits());
  for (const Batch& batch : {random_batch(config, {70, 1, 9}, 16), ones}) {
    const auto result = accumulate(model, {batch});
    for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
      for (const char* name : {"q_proj", "k_proj"}) {
        const auto& spec =
            model.parameters().find(fmt::format("model.layers.{}.self_attn.{}.weight", layer, name));
        EXPECT_EQ(test::values_of(model.gradient(spec)),
                  std::vector<float>(static_cast<size_t>(spec.num_elements()), 0.0f))
            << spec.name;
      }
    }
  }
}

// Bits may differ between thread counts (partial sums of weight gradients); values agree to rounding.
TEST(Model, ThreadsAgreeToRounding) {
  const ModelConfig config = small_config();
  const Batch batch = random_batch(config, {200, 150}, 10);
  ModelLimits limits = small_limits();
  Model one = seeded_model(config, limits);
  limits.num_threads = 2;
  Model two = seeded_model(config, limits);
  EXPECT_EQ(test::values_of(one.weights_A()), test::values_of(two.weights_A()));
  const auto want = accumulate(one, {batch}), got = accumulate(two, {batch});
  const double error = test::worst_parameter_error(one, got.gradients, want.gradients);
  RecordProperty("worst_parameter_error", fmt::format("{:.2e}", error));
  EXPECT_LE(error, 1e-5);
  EXPECT_NEAR(got.lm_loss, want.lm_loss, 1e-6);
  EXPECT_NEAR(got.aux_loss, want.aux_loss, 1e-9);
}

TEST(Model, InferenceModelGivesTheTrainingModelsLogits) {
  const ModelConfig config = small_config();
  const Batch batch = random_batch(config, {50, 3}, 11);
  ModelLimits limits = small_limits();
  Model training = seeded_model(config, limits);
  limits.training = false;
  Model inference = seeded_model(config, limits);
  training.poison_activations();
  inference.poison_activations();
  EXPECT_EQ(logits_of(inference, batch), logits_of(training, batch));
  EXPECT_EQ(test::evaluate_sums(inference, batch).loss.weighted_nll,
            test::evaluate_sums(training, batch).loss.weighted_nll);
  EXPECT_FALSE(inference.gradients_A());
}

TEST(Model, TheSeedAloneDecidesTheWeights) {
  const ModelConfig config = small_config();
  Model a = seeded_model(config, small_limits(), 1), b = seeded_model(config, small_limits(8, 8), 1);
  Model c = seeded_model(config, small_limits(), 2);
  EXPECT_EQ(test::values_of(a.weights_A()), test::values_of(b.weights_A()));
  EXPECT_NE(test::values_of(a.weights_A()), test::values_of(c.weights_A()));
  const std::vector<float> gate =
      test::values_of(a.weight(a.parameters().find("model.layers.0.mlp.gate.weight")));
  EXPECT_NE(gate, test::values_of(a.weight(a.parameters().find("model.layers.1.mlp.gate.weight"))));
}

TEST(Model, EmptyBatchIsLegal) {
  const ModelConfig config = small_config();
  Model model = seeded_model(config, small_limits());
  Batch empty;
  empty.clear();
  const auto nothing = accumulate(model, {empty});
  EXPECT_EQ(nothing.lm_loss, 0.0);
  EXPECT_EQ(nothing.aux_loss, 0.0);
  EXPECT_EQ(nothing.gradients, std::vector<float>(nothing.gradients.size(), 0.0f));
  const Batch batch = random_batch(config, {30}, 12);
  const auto want = accumulate(model, {batch}), got = accumulate(model, {empty, batch, empty});
  EXPECT_EQ(got.gradients, want.gradients);
  EXPECT_EQ(got.aux_loss, want.aux_loss);
}

// Every router sees the same row for every token of a record's start, so ties are exact between tokens; zero
// router weights make them exact between experts, where the lowest index wins.
TEST(Model, TiesAreDefined) {
  const ModelConfig config = small_config();
  Model model = seeded_model(config, small_limits());
  Batch batch = random_batch(config, {64, 64}, 13);
  std::fill(batch.tokens.begin(), batch.tokens.end(), 0);
  for (auto& target : batch.targets) target = target == kIgnoreTarget ? target : 0;
  const auto repeated = accumulate(model, {batch});
  EXPECT_TRUE(test::all_finite(repeated.gradients));
  EXPECT_TRUE(std::isfinite(repeated.lm_loss));
  EXPECT_EQ(accumulate(model, {batch}).gradients, repeated.gradients);

  for (int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    const auto& gate = model.parameters().find(fmt::format("model.layers.{}.mlp.gate.weight", layer));
    std::fill_n(model.weight(gate).f32(), gate.num_elements(), 0.0f);
  }
  const auto tied = accumulate(model, {batch});
  EXPECT_TRUE(test::all_finite(tied.gradients));
  const RoutingStats routing = model.routing();
  const int64_t* counts = routing.counts_LE.i64();
  for (int64_t i = 0; i < routing.counts_LE.num_elements(); ++i) {
    EXPECT_EQ(counts[i], i % config.num_local_experts < config.num_experts_per_tok ? batch.num_tokens() : 0)
        << i;
  }
  EXPECT_NEAR(tied.aux_loss, static_cast<double>(config.num_experts_per_tok), 1e-6);
}

std::string place_of_nan(const std::string& name, const ModelLimits& limits) {
  const ModelConfig config = small_config();
  Model model = seeded_model(config, limits);
  const Batch batch = random_batch(config, {60}, 14);
  model.poison_activations();
  model.forward(model.upload(batch));
  EXPECT_EQ(model.first_nonfinite_sync(), "");
  const auto& spec = model.parameters().find(name);
  std::fill_n(model.weight(spec).f32(), spec.num_elements(), NAN);
  model.poison_activations();
  EXPECT_TRUE(std::isnan(test::evaluate_sums(model, batch).loss.weighted_nll)) << name;
  return model.first_nonfinite_sync();
}

TEST(Model, NamesThePlaceOfTheFirstNonfiniteValue) {
  const ModelLimits limits = small_limits();
  EXPECT_EQ(place_of_nan("model.embed_tokens.weight", limits), "embedding");
  EXPECT_EQ(place_of_nan("model.layers.1.input_layernorm.weight", limits), "layer 1 attention");
  EXPECT_EQ(place_of_nan("model.layers.1.self_attn.v_proj.weight", limits), "layer 1 attention");
  EXPECT_EQ(place_of_nan("model.layers.1.mlp.gate.weight", limits), "layer 1 router");
  EXPECT_EQ(place_of_nan("model.layers.1.mlp.experts.gate_up_proj", limits), "layer 1 experts");
  EXPECT_EQ(place_of_nan("model.layers.2.mlp.experts.down_proj", limits), "layer 2 experts");
  EXPECT_EQ(place_of_nan("model.norm.weight", limits), "final norm");
}

TEST(Model, NamesTheLayerAloneWhereItIsRecomputed) {
  ModelLimits limits = small_limits();
  limits.recompute_layers = 2;
  EXPECT_EQ(place_of_nan("model.embed_tokens.weight", limits), "embedding");
  EXPECT_EQ(place_of_nan("model.layers.0.self_attn.v_proj.weight", limits), "layer 0");
  EXPECT_EQ(place_of_nan("model.layers.1.mlp.experts.down_proj", limits), "layer 1");
  EXPECT_EQ(place_of_nan("model.layers.2.self_attn.q_proj.weight", limits), "layer 2 attention");
  limits.recompute_layers = 3;
  EXPECT_EQ(place_of_nan("model.layers.2.self_attn.q_proj.weight", limits), "layer 2");
}

TEST(Model, RefusesABatchThatMemoryIsNotPlannedFor) {
  const ModelConfig config = small_config();
  Model model(config, small_limits(64, 32));
  EXPECT_THROW(model.upload(random_batch(config, {33, 31, 1}, 15)), std::exception);
  EXPECT_THROW(model.upload(random_batch(config, {33}, 15)), std::exception);
  EXPECT_NO_THROW(model.upload(random_batch(config, {32, 32}, 15)));
}

}  // namespace
}  // namespace biomoe
