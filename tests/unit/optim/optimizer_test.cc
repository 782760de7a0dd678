#include "biomoe/optim/optimizer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "biomoe/core/rng.h"

namespace biomoe {
namespace {

ModelConfig tiny_model() {
  ModelConfig config;
  config.vocab_size = 7;
  config.hidden_size = 8;
  config.intermediate_size = 12;
  config.num_hidden_layers = 2;
  config.num_attention_heads = 2;
  config.num_key_value_heads = 1;
  config.num_local_experts = 3;
  return config;
}

// Flat arenas of one model with an optimiser over them; the gaps between parameters hold NaN.
struct Fixture {
  explicit Fixture(const AdamwConfig& config, int num_threads = 2)
      : optimizer(parameters, config),
        weights(static_cast<size_t>(parameters.arena_elements()), std::nanf("")),
        gradients(weights),
        scratch(size_t{1} << 16, "test scratch") {
    ctx.num_threads = num_threads;
    ctx.scratch = &scratch;
  }

  TensorView view(std::vector<float>& arena) {
    return {arena.data(), DType::kF32, Shape{parameters.arena_elements()}};
  }
  void fill(std::vector<float>& arena, uint64_t seed, double scale) {
    const Rng rng(seed, RngStream::kTest);
    for (const ParamSpec& spec : parameters.specs()) {
      for (int64_t i = spec.offset; i < spec.offset + spec.num_elements(); ++i) {
        arena[static_cast<size_t>(i)] = static_cast<float>(scale * rng.normal(static_cast<uint64_t>(i)));
      }
    }
  }
  // The norm of the gradients, and the first parameter that is not finite.
  double norm(std::string* nonfinite = nullptr, double max_norm = 0) {
    optimizer.clip(ctx, view(gradients), max_norm);
    if (nonfinite) *nonfinite = optimizer.first_nonfinite();
    return optimizer.gradient_norm();
  }
  void update(double lr, double max_norm) {
    optimizer.start_step(ctx, lr);
    norm(nullptr, max_norm);
    optimizer.update(ctx, {.weights_A = view(weights), .gradients_A = view(gradients)});
  }
  float& at(std::vector<float>& arena, const std::string& name, int64_t index) {
    return arena[static_cast<size_t>(parameters.find(name).offset + index)];
  }

  const ParameterList parameters{tiny_model()};
  Optimizer optimizer;
  std::vector<float> weights, gradients;
  Arena scratch;
  Context ctx;
};

TEST(Optimizer, WritesNoCodesOnTheCpu) {
  const Fixture f(AdamwConfig{});
  for (size_t i = 0; i < f.parameters.specs().size(); ++i) EXPECT_FALSE(f.optimizer.writes_codes(i));
}

// One element of AdamW in double: Loshchilov and Hutter (2019), algorithm 2, decay on the weight before.
struct Element {
  double weight = 0, mean = 0, square = 0;
  void update(const AdamwConfig& c, double lr, double gradient, bool decay, int step) {
    const double beta1 = c.betas[0], beta2 = c.betas[1];
    mean = beta1 * mean + (1 - beta1) * gradient;
    square = beta2 * square + (1 - beta2) * gradient * gradient;
    if (decay) weight *= 1 - lr * c.weight_decay;
    weight -=
        lr * (mean / (1 - std::pow(beta1, step))) / (std::sqrt(square / (1 - std::pow(beta2, step))) + c.eps);
  }
};

// Steps with their own rate and clipping, against Element; `decay_norms` as configured.
void expect_follows_reference(const AdamwConfig& config) {
  constexpr int kSteps = 6;
  constexpr double kMaxNorm = 2.0;
  Fixture f(config);
  f.fill(f.weights, 1, 0.5);
  std::vector<Element> want(f.weights.size());
  for (size_t i = 0; i < want.size(); ++i) want[i].weight = static_cast<double>(f.weights[i]);
  bool clipped = false, unclipped = false;
  for (int step = 1; step <= kSteps; ++step) {
    f.fill(f.gradients, static_cast<uint64_t>(10 + step), step % 2 == 0 ? 1e-2 : 1.0);
    double squares = 0;
    for (const ParamSpec& spec : f.parameters.specs()) {
      for (int64_t i = spec.offset; i < spec.offset + spec.num_elements(); ++i) {
        const auto gradient = static_cast<double>(f.gradients[static_cast<size_t>(i)]);
        squares += gradient * gradient;
      }
    }
    const double norm = std::sqrt(squares);
    std::string nonfinite;
    const double got_norm = f.norm(&nonfinite);
    EXPECT_NEAR(got_norm, norm, 1e-12 * norm) << "sums in double";
    EXPECT_EQ(nonfinite, "");
    const double scale = norm > kMaxNorm ? kMaxNorm / (norm + 1e-6) : 1.0;
    (scale < 1.0 ? clipped : unclipped) = true;
    const double lr = 1e-2 * step;
    f.update(lr, kMaxNorm);
    EXPECT_EQ(f.optimizer.steps(), step);
    for (const ParamSpec& spec : f.parameters.specs()) {
      const bool decay = spec.kind != ParamKind::kNorm || config.decay_norms;
      for (int64_t i = spec.offset; i < spec.offset + spec.num_elements(); ++i) {
        const auto index = static_cast<size_t>(i);
        want[index].update(config, lr, scale * static_cast<double>(f.gradients[index]), decay, step);
      }
    }
  }
  EXPECT_TRUE(clipped && unclipped) << "the gradients should try both";
  // Relative to the parameter's largest value: a few roundings a step (weight, both moments, the update).
  constexpr double kTolerance = kSteps * 8 * static_cast<double>(std::numeric_limits<float>::epsilon());
  const float* mean = f.optimizer.exp_avg_A().f32();
  const float* square = f.optimizer.exp_avg_sq_A().f32();
  for (const ParamSpec& spec : f.parameters.specs()) {
    double largest[3] = {0, 0, 0}, error[3] = {0, 0, 0};
    for (int64_t i = spec.offset; i < spec.offset + spec.num_elements(); ++i) {
      const Element& element = want[static_cast<size_t>(i)];
      const double wanted[3] = {element.weight, element.mean, element.square};
      const float got[3] = {f.weights[static_cast<size_t>(i)], mean[i], square[i]};
      for (int k = 0; k < 3; ++k) {
        ASSERT_TRUE(std::isfinite(got[k])) << spec.name;
        largest[k] = std::max(largest[k], std::abs(wanted[k]));
        error[k] = std::max(error[k], std::abs(static_cast<double>(got[k]) - wanted[k]));
      }
    }
    for (int k = 0; k < 3; ++k) EXPECT_LE(error[k], kTolerance * largest[k]) << spec.name << " " << k;
  }
  const auto untouched =
      std::count_if(f.weights.begin(), f.weights.end(), [](float value) { return std::isnan(value); });
  EXPECT_GT(untouched, 0);
  EXPECT_EQ(untouched, f.parameters.arena_elements() - f.parameters.num_parameters()) << "the gaps";
}

TEST(Optimizer, FollowsAdamWInDoubleOverSteps) {
  expect_follows_reference({.lr = 1, .betas = {0.9, 0.95}, .eps = 1e-8, .weight_decay = 0.3});
}

TEST(Optimizer, DecayOfNormsIsAChoice) {
  expect_follows_reference(
      {.lr = 1, .betas = {0.8, 0.99}, .eps = 1e-3, .weight_decay = 0.3, .decay_norms = true});
}

TEST(Optimizer, ZeroGradientsDecayMatricesOnly) {
  Fixture f({.weight_decay = 0.5});
  f.fill(f.weights, 3, 1.0);
  f.fill(f.gradients, 3, 0.0);
  const std::vector<float> before = f.weights;
  f.update(0.1, 0.0);
  for (const ParamSpec& spec : f.parameters.specs()) {
    const auto at = static_cast<size_t>(spec.offset);
    const double factor = spec.kind == ParamKind::kNorm ? 1.0 : 1.0 - 0.1 * 0.5;
    EXPECT_FLOAT_EQ(f.weights[at], static_cast<float>(factor * static_cast<double>(before[at]))) << spec.name;
  }
}

TEST(Optimizer, UpdatesDoNotDependOnTheNumberOfThreads) {
  std::vector<float> first;
  for (const int threads : {1, 2, 5}) {
    Fixture f({.weight_decay = 0.1}, threads);
    f.fill(f.weights, 1, 1.0);
    f.fill(f.gradients, 2, 1.0);
    f.update(0.1, 1.0);
    std::vector<float> values;
    for (const ParamSpec& spec : f.parameters.specs()) {
      const auto begin = f.weights.begin() + spec.offset;
      values.insert(values.end(), begin, begin + spec.num_elements());
    }
    if (first.empty()) first = values;
    EXPECT_EQ(values, first) << threads;
  }
}

TEST(Optimizer, TheFirstParameterWithANonFiniteGradientIsNamed) {
  const float kBad[] = {std::nanf(""), std::numeric_limits<float>::infinity(),
                        -std::numeric_limits<float>::infinity()};
  for (const float bad : kBad) {
    Fixture f({});
    f.fill(f.gradients, 4, 1.0);
    f.at(f.gradients, "model.layers.1.mlp.experts.down_proj", 5) = bad;
    f.at(f.gradients, "lm_head.weight", 0) = bad;
    std::string name;
    EXPECT_FALSE(std::isfinite(f.norm(&name)));
    EXPECT_EQ(name, "model.layers.1.mlp.experts.down_proj");
    f.at(f.gradients, "model.embed_tokens.weight", 2) = bad;
    f.norm(&name);
    EXPECT_EQ(name, "model.embed_tokens.weight");
    f.fill(f.weights, 5, 1.0);
    const std::vector<float> before = f.weights;
    f.update(0.1, 1.0);
    EXPECT_FALSE(f.optimizer.update_made());
    EXPECT_EQ(std::memcmp(f.weights.data(), before.data(), before.size() * sizeof(float)), 0);
  }
}

TEST(Optimizer, LargeGradientsHaveAFiniteNorm) {
  Fixture f({});
  f.fill(f.gradients, 4, 0.0);
  f.at(f.gradients, "lm_head.weight", 1) = 3e38f;  // its square is beyond fp32
  std::string name;
  EXPECT_NEAR(f.norm(&name), 3e38, 1e32);
  EXPECT_EQ(name, "");
}

// Planning needs no GPU.
TEST(Optimizer, PlansMastersOfAGpuInOnePieceOrAsRemainders) {
  const ParameterList parameters(tiny_model());
  const auto elements = static_cast<size_t>(parameters.arena_elements());
  const auto masters = [&](const OptimizerOptions& options) {
    return Optimizer::plan_memory(parameters, options).masters;
  };
  EXPECT_EQ(masters({.device = Device::kCuda}), align_up(4 * elements));
  EXPECT_EQ(masters({.device = Device::kCuda, .store_param_remainders = true}), align_up(2 * elements));
  EXPECT_EQ(masters({.device = Device::kCuda, .states = OptimizerStates::kBf16}), 0u);
  EXPECT_EQ(masters({.device = Device::kCpu, .store_param_remainders = true}), 0u);
}

}  // namespace
}  // namespace biomoe
