// The gradient of the whole loss against central differences along directions, for each kind of parameter.
#include <gtest/gtest.h>

#include "tests/unit/model/model_test_util.h"

namespace biomoe {
namespace {

using test::small_config;

struct Evaluation {
  double loss = 0;
  std::vector<int64_t> counts;  // a step that changes the routing crosses a jump of the loss
};

Evaluation evaluate(Model& model, const Batch& batch) {
  const StepSums sums = test::evaluate_sums(model, batch);
  Evaluation result;
  result.loss = sums.loss.weighted_nll / batch.target_weight +
                model.config().router_aux_loss_coef * sums.balance_loss +
                model.config().router_z_loss_coef * sums.z_loss;
  const TensorView counts = model.routing().counts_LE;
  result.counts.assign(counts.i64(), counts.i64() + counts.num_elements());
  return result;
}

struct Difference {
  double numeric = 0, analytic = 0;
  bool same_routing = false;
};

Difference along(Model& model, const Batch& batch, const std::vector<float>& direction, double step) {
  const std::vector<float> start = test::values_of(model.weights_A());
  const std::vector<float> gradient = test::values_of(model.gradients_A());
  float* weights = model.weights_A().f32();
  // The weights that were really set decide the step, so that rounding them costs nothing.
  std::vector<double> moved(start.size());
  auto move = [&](double sign) {
    for (size_t i = 0; i < start.size(); ++i) {
      weights[i] =
          static_cast<float>(static_cast<double>(start[i]) + sign * step * static_cast<double>(direction[i]));
      moved[i] += sign * static_cast<double>(weights[i]);
    }
  };
  move(1);
  const Evaluation high = evaluate(model, batch);
  move(-1);
  const Evaluation low = evaluate(model, batch);
  std::copy(start.begin(), start.end(), weights);
  Difference result;
  for (size_t i = 0; i < start.size(); ++i) result.analytic += static_cast<double>(gradient[i]) * moved[i];
  result.analytic /= 2 * step;
  result.numeric = (high.loss - low.loss) / (2 * step);
  result.same_routing = high.counts == low.counts;
  return result;
}

// Random direction, standard normal on the parameters of `kind` and 0 elsewhere; along_gradient: the gradient
// itself, at the same length.
std::vector<float> direction_of(const Model& model, ParamKind kind, uint32_t number, bool along_gradient) {
  std::vector<float> direction(static_cast<size_t>(model.weights_A().num_elements()), 0.0f);
  const Rng rng(99, RngStream::kTest, number);
  double elements = 0, norm = 0;
  for (const auto& spec : model.parameters().specs()) {
    if (spec.kind != kind) continue;
    for (int64_t i = spec.offset; i < spec.offset + spec.num_elements(); ++i) {
      const float gradient = model.gradients_A().f32()[i];
      direction[static_cast<size_t>(i)] =
          along_gradient ? gradient : static_cast<float>(rng.normal(static_cast<uint64_t>(i)));
      norm += static_cast<double>(gradient) * static_cast<double>(gradient);
      elements += 1;
    }
  }
  if (along_gradient) {
    for (float& value : direction) value *= static_cast<float>(std::sqrt(elements / norm));
  }
  return direction;
}

double gradient_norm(const Model& model, ParamKind kind) {
  double norm = 0;
  for (const auto& spec : model.parameters().specs()) {
    if (spec.kind != kind) continue;
    for (const float value : test::values_of(model.gradient(spec)))
      norm += static_cast<double>(value) * static_cast<double>(value);
  }
  return std::sqrt(norm);
}

void check_kind(Model& model, const Batch& batch, ParamKind kind) {
  const double norm = gradient_norm(model, kind);
  ASSERT_GT(norm, 1e-3);
  int checked = 0;
  for (uint32_t number = 0; number < 12; ++number) {
    const bool along_gradient = number < 3;
    const double step = 5e-5 * (1 << number % 3);
    const Difference d = along(model, batch, direction_of(model, kind, number, along_gradient), step);
    if (!d.same_routing) continue;
    ++checked;
    // A random direction meets the gradient at length `norm`; the gradient itself sqrt(elements) times that.
    const double scale = along_gradient ? std::abs(d.analytic) : norm;
    EXPECT_LE(std::abs(d.numeric - d.analytic), 2e-2 * scale)
        << "kind " << static_cast<int>(kind) << " direction " << number << ": " << d.numeric << " against "
        << d.analytic;
  }
  EXPECT_GE(checked, 4);
}

class ModelGradient : public ::testing::TestWithParam<std::tuple<bool, int64_t>> {};

TEST_P(ModelGradient, EqualsCentralDifferences) {
  ModelConfig config = small_config();
  config.tie_word_embeddings = std::get<0>(GetParam());
  config.num_experts_per_tok = std::get<1>(GetParam());
  if (config.tie_word_embeddings) config.sliding_window = 5;
  config.router_aux_loss_type = config.tie_word_embeddings ? AuxLossType::kPerLayer : AuxLossType::kHf;
  Model model(config, test::small_limits(64, 32));
  model.initialize(6);
  const Batch batch = test::random_batch(config, {17, 1, 12}, 41);
  test::accumulate(model, {batch});
  for (const auto kind : {ParamKind::kEmbedding, ParamKind::kNorm, ParamKind::kAttention, ParamKind::kRouter,
                          ParamKind::kExpert, ParamKind::kHead}) {
    if (kind == ParamKind::kHead && config.tie_word_embeddings) continue;
    check_kind(model, batch, kind);
  }
}

INSTANTIATE_TEST_SUITE_P(TiedAndTopK, ModelGradient,
                         ::testing::Combine(::testing::Bool(), ::testing::Values(1, 2, 5)));

}  // namespace
}  // namespace biomoe
