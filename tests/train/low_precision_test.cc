// Training in each 8-bit recipe: that it learns, is the same again, and goes on from a checkpoint bit for
// bit.
#include <gmock/gmock.h>

#include "tests/train/trainer_test_util.h"
#include "tests/unit/model/model_test_util.h"

namespace biomoe {
namespace {

using test::message_of;
using test::metrics;
using test::TempFolder;
using test::tensor_files;
using test::tiny_run;
using test::train;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

RunConfig fp8_run(const TempFolder& folder, Fp8Recipe recipe) {
  RunConfig config = tiny_run(folder);
  config.num_threads = 1;
  config.fp8_config.enabled = true;
  config.fp8_config.fp8_recipe = recipe;
  config.fp8_config.fp8_recipe_kwargs.amax_history_len = 4;
  return config;
}

double final_loss(const RunConfig& config) {
  return test::summary(config)["final_loss"].get<double>();
}

class LowPrecision : public ::testing::TestWithParam<Fp8Recipe> {};

TEST_P(LowPrecision, AResumedRunIsTheUninterruptedRunBitForBit) {
  const TempFolder whole_folder, stopped_folder;
  RunConfig whole = fp8_run(whole_folder, GetParam()), stopped = fp8_run(stopped_folder, GetParam());
  for (RunConfig* config : {&whole, &stopped}) {
    config->checkpoint.save_every_n_steps = 3;
    // A validation sees other tensors than training; none of it may enter the scales.
    config->dataset.validation_fraction = 0.2;
    config->validation.every_n_steps = config == &whole ? 0 : 2;
  }
  train(whole);
  stopped.num_train_steps = 5;
  stopped.checkpoint.save_final_model = false;
  train(stopped);
  stopped.num_train_steps = whole.num_train_steps;
  stopped.checkpoint.save_final_model = true;
  train(stopped);
  const auto files = tensor_files(whole, 7);
  EXPECT_EQ(files.size(), GetParam() == Fp8Recipe::kDelayedScaling ? 4u : 3u);
  EXPECT_TRUE(files == tensor_files(stopped, 7));
  EXPECT_EQ(final_loss(whole), final_loss(stopped));
}

TEST_P(LowPrecision, IsNearFp32AndNotTheSame) {
  const TempFolder plain_folder, folder;
  RunConfig plain = tiny_run(plain_folder), config = fp8_run(folder, GetParam());
  for (RunConfig* run : {&plain, &config}) {
    run->num_threads = 1;
    run->num_train_steps = 60;
    run->adamw.lr = 3e-3;
  }
  train(plain);
  train(config);
  EXPECT_NE(final_loss(plain), final_loss(config));
  EXPECT_NEAR(final_loss(config) / final_loss(plain), 1.0, 0.03);
}

TEST_P(LowPrecision, WeightsInEightBitsTrainAlikeFromOtherFirstValues) {
  const TempFolder plain_folder, kept_folder, folder, stopped_folder;
  RunConfig plain = fp8_run(plain_folder, GetParam()), kept = fp8_run(kept_folder, GetParam());
  RunConfig rounded = fp8_run(folder, GetParam()), stopped = fp8_run(stopped_folder, GetParam());
  kept.fp8_config.quantized_model_init_kwargs = {.enabled = true, .preserve_high_precision_init_val = true};
  rounded.fp8_config.quantized_model_init_kwargs.enabled = true;
  stopped.fp8_config.quantized_model_init_kwargs.enabled = true;
  for (const RunConfig* config : {&plain, &kept, &rounded}) train(*config);
  EXPECT_TRUE(tensor_files(plain, 7) == tensor_files(kept, 7));
  EXPECT_FALSE(tensor_files(plain, 7) == tensor_files(rounded, 7));
  // Only first weights are rounded, not those that a run goes on with.
  stopped.num_train_steps = 3;
  train(stopped);
  stopped.num_train_steps = rounded.num_train_steps;
  train(stopped);
  EXPECT_TRUE(tensor_files(rounded, 7) == tensor_files(stopped, 7));
}

TEST_P(LowPrecision, RoundedWeightsAreWhatProductsTakeThemFor) {
  const TempFolder folder;
  const RunConfig config = fp8_run(folder, GetParam());
  ModelLimits limits{.max_tokens = 64, .max_seqlen = 32};
  limits.fp8 = config.fp8_config;
  ModelConfig tiny = config.model;
  tiny.vocab_size = 16;
  Model model(tiny, limits);
  model.initialize(1);
  const auto first = test::values_of(model.weights_A());
  model.round_weights_to_codes();
  const auto rounded = test::values_of(model.weights_A());
  model.round_weights_to_codes();
  EXPECT_TRUE(rounded == test::values_of(model.weights_A()));
  size_t changed = 0, quantised = 0;
  for (const ParamSpec& spec : model.parameters().specs()) {
    const bool product = spec.kind == ParamKind::kAttention || spec.kind == ParamKind::kExpert;
    for (int64_t i = spec.offset; i < spec.offset + spec.num_elements(); ++i) {
      const auto at = static_cast<size_t>(i);
      quantised += product ? 1 : 0;
      changed += rounded[at] != first[at] ? 1 : 0;
      ASSERT_TRUE(product || rounded[at] == first[at]) << spec.name;
      // Three bits of mantissa; below the smallest normal code an absolute step instead.
      ASSERT_NEAR(rounded[at], first[at], std::max(std::abs(first[at]) / 16, 0x1p-10f)) << spec.name;
    }
  }
  EXPECT_GT(changed, quantised * 9 / 10);
}

TEST_P(LowPrecision, RecomputedLayersGiveTheSameRun) {
  const TempFolder kept_folder, recomputed_folder;
  RunConfig kept = fp8_run(kept_folder, GetParam()), recomputed = fp8_run(recomputed_folder, GetParam());
  recomputed.recompute_layers = 2;
  train(kept);
  train(recomputed);
  EXPECT_TRUE(tensor_files(kept, 7) == tensor_files(recomputed, 7));
}

INSTANTIATE_TEST_SUITE_P(Recipes, LowPrecision,
                         ::testing::Values(Fp8Recipe::kMxfp8BlockScaling, Fp8Recipe::kFloat8BlockScaling,
                                           Fp8Recipe::kFloat8CurrentScaling, Fp8Recipe::kDelayedScaling),
                         [](const auto& instance) {
                           return std::string(kFp8RecipeNames[static_cast<size_t>(instance.param)]);
                         });

TEST(LowPrecisionTest, LayerPrecisionChoosesLayers) {
  const TempFolder plain_folder, off_folder, half_folder, all_folder;
  RunConfig plain = tiny_run(plain_folder), off = fp8_run(off_folder, Fp8Recipe::kMxfp8BlockScaling);
  RunConfig half = fp8_run(half_folder, Fp8Recipe::kMxfp8BlockScaling);
  RunConfig all = fp8_run(all_folder, Fp8Recipe::kMxfp8BlockScaling);
  off.model.layer_precision = {"bf16", "bf16"};
  half.model.layer_precision = {"fp8", "bf16"};
  for (const RunConfig* config : {&plain, &off, &half, &all}) train(*config);
  EXPECT_TRUE(tensor_files(plain, 7) == tensor_files(off, 7));
  EXPECT_FALSE(tensor_files(half, 7) == tensor_files(off, 7));
  EXPECT_FALSE(tensor_files(half, 7) == tensor_files(all, 7));
}

TEST(LowPrecisionTest, DelayedScalingStartsFromACheckpointWithoutScales) {
  const TempFolder folder;
  RunConfig config = fp8_run(folder, Fp8Recipe::kMxfp8BlockScaling);
  config.num_train_steps = 3;
  train(config);
  config.fp8_config.fp8_recipe = Fp8Recipe::kDelayedScaling;
  config.num_train_steps = 5;
  ::testing::internal::CaptureStderr();
  train(config);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("fp8_config.fp8_recipe=MXFP8BlockScaling (now DelayedScaling)"),
                    HasSubstr("step_3: holds no scales of DelayedScaling, which begins with 1 and no amax")));
  EXPECT_LT(final_loss(config), metrics(config).front()["loss"].get<double>());
  EXPECT_EQ(tensor_files(config, 5).size(), 4u);
  // From here on its own histories are there.
  config.num_train_steps = 6;
  ::testing::internal::CaptureStderr();
  train(config);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), Not(HasSubstr("holds no scales")));
  config.num_train_steps = 7;
  config.fp8_config.fp8_recipe_kwargs.amax_history_len = 8;
  EXPECT_THAT(message_of(ErrorKind::kUser, [&] { train(config); }),
              AllOf(HasSubstr("fp8_config.fp8_recipe_kwargs.amax_history_len=4"), HasSubstr("now 8")));
}

TEST(LowPrecisionTest, WhatDoesNotFitIsRefused) {
  const TempFolder folder;
  RunConfig config = fp8_run(folder, Fp8Recipe::kMxfp8BlockScaling);
  config.model.layer_precision = {"fp8"};
  EXPECT_THAT(message_of(ErrorKind::kUser, [&] { config.validate(); }),
              HasSubstr("layer_precision has 1 entries"));
  config.model.layer_precision = {"fp8", "fp4"};
  EXPECT_THAT(message_of(ErrorKind::kUser, [&] { config.validate(); }), HasSubstr("expected fp8 or bf16"));
  config.model.layer_precision = {"fp8", "bf16"};
  config.fp8_config.enabled = false;
  EXPECT_THAT(message_of(ErrorKind::kUser, [&] { config.validate(); }),
              HasSubstr("set fp8_config.enabled=true"));
  config.fp8_config.fp8_recipe_kwargs.amax_history_len = 0;
  EXPECT_THAT(message_of(ErrorKind::kUser, [&] { config.validate(); }), HasSubstr("amax_history_len=0"));
  config.fp8_config.fp8_recipe_kwargs.amax_history_len = 4;
  for (const int64_t margin : {-1, 9}) {
    config.fp8_config.fp8_recipe_kwargs.margin = margin;
    EXPECT_THAT(message_of(ErrorKind::kUser, [&] { config.fp8_config.validate(); }),
                HasSubstr("fp8_config.fp8_recipe_kwargs.margin="));
  }
  RunConfig eight = fp8_run(folder, Fp8Recipe::kMxfp8BlockScaling);
  eight.fp8_config.quantized_model_init_kwargs.enabled = true;
  EXPECT_NO_THROW(eight.validate());
  eight.optimizer_store_param_remainders = false;
  EXPECT_THAT(message_of(ErrorKind::kUser, [&] { eight.validate(); }),
              HasSubstr("set optimizer_store_param_remainders=true"));
  eight.optimizer_states = OptimizerStates::kBf16;
  EXPECT_THAT(message_of(ErrorKind::kUser, [&] { eight.validate(); }),
              HasSubstr("set optimizer_states=fp32"));
  eight.fp8_config.enabled = false;
  EXPECT_THAT(message_of(ErrorKind::kUser, [&] { eight.validate(); }),
              HasSubstr("set fp8_config.enabled=true"));
  Fp8Config fp8;
  fp8.enabled = true;
  fp8.fp8_recipe = Fp8Recipe::kFloat8CurrentScaling;
  fp8.fp8_recipe_kwargs.power_2_scale = false;
  EXPECT_NO_THROW(resolved_fp8_config(fp8, Device::kCpu));
  EXPECT_THAT(message_of(ErrorKind::kUser, [&] { resolved_fp8_config(fp8, Device::kCuda); }),
              HasSubstr("set power_2_scale=true or device=cpu"));
}

}  // namespace
}  // namespace biomoe
