// The mixture-of-experts layer against a plain computation in double, in every way of running the experts.
#include "biomoe/moe/moe_layer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <vector>

#include "biomoe/core/rng.h"

namespace biomoe {
namespace {

constexpr int64_t kTokens = 23;

struct LayerCase {
  MoeShape shape{.width = 12, .expert_width = 10, .experts = 4, .top_k = 2};
  int64_t favourite = -1;  // all tokens go to this expert first
  int64_t avoided = -1;    // no token goes to this expert
};

// Owns everything that a call of the layer needs, for kTokens tokens.
struct Layer {
  explicit Layer(const LayerCase& c, ExpertFfnMode ffn_mode) : shape(c.shape), mode(ffn_mode) {
    const int64_t D = shape.width, F = shape.expert_width, E = shape.experts;
    for (MoeWeights* set : {&weights, &gradients}) {
      set->gate_ED = arena.tensor(DType::kF32, {E, D});
      set->gate_up_E2FD = arena.tensor(DType::kF32, {E, 2 * F, D});
      set->down_EDF = arena.tensor(DType::kF32, {E, D, F});
    }
    stats = {arena.tensor(DType::kI64, {E}), arena.tensor(DType::kF64, {E}), arena.tensor(DType::kF64, {1})};
    x = arena.tensor(DType::kF32, {kTokens, D});
    arena.poison_free();
    y = arena.tensor(DType::kF32, {kTokens, D});
    saved = allocate_moe_saved(arena, shape, kTokens);
    workspace = allocate_moe_workspace(arena, shape, kTokens, true);
    uint32_t number = 0;
    for (const TensorView& view : {weights.gate_ED, weights.gate_up_E2FD, weights.down_EDF, x}) {
      const Rng rng(8, RngStream::kTest, number++);
      for (int64_t i = 0; i < view.num_elements(); ++i)
        view.f32()[i] = static_cast<float>(0.5 * rng.normal(static_cast<uint64_t>(i)));
    }
    // Feature 0 is 1 for every token, so that its router weight is a bias.
    for (int64_t t = 0; t < kTokens; ++t) x.f32()[t * D] = 1.0f;
    if (c.favourite >= 0) weights.gate_ED.f32()[c.favourite * D] = 40.0f;
    if (c.avoided >= 0) weights.gate_ED.f32()[c.avoided * D] = -40.0f;
  }
  void forward() { moe_forward(ctx, mode, shape, weights, x, saved, workspace, stats, y); }

  MoeShape shape;
  ExpertFfnMode mode;
  Arena arena{1 << 22};
  Arena scratch{1 << 20};
  Context ctx{.device = Device::kCpu, .num_threads = 2, .scratch = &scratch};
  MoeWeights weights, gradients;
  LayerRoutingStats stats;
  TensorView x, y;
  MoeSaved saved;
  MoeWorkspace workspace;
};

// Output of token t in double, straight from the definition.
std::vector<double> direct_output(const Layer& layer, int64_t t) {
  const int64_t D = layer.shape.width, F = layer.shape.expert_width, E = layer.shape.experts;
  const float* x = layer.x.f32() + t * D;
  auto dot = [](const float* w, const auto* v, int64_t n) {
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(w[i]) * static_cast<double>(v[i]);
    return sum;
  };
  std::vector<double> score(static_cast<size_t>(E));
  for (int64_t e = 0; e < E; ++e)
    score[static_cast<size_t>(e)] = std::exp(dot(layer.weights.gate_ED.f32() + e * D, x, D));
  std::vector<int64_t> order(static_cast<size_t>(E));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return score[static_cast<size_t>(a)] > score[static_cast<size_t>(b)];
  });
  order.resize(static_cast<size_t>(layer.shape.top_k));
  double total = 0;
  for (const int64_t e : order) total += score[static_cast<size_t>(e)];
  std::vector<double> y(static_cast<size_t>(D));
  for (const int64_t e : order) {
    const float* gate_up = layer.weights.gate_up_E2FD.f32() + e * 2 * F * D;
    std::vector<double> act(static_cast<size_t>(F));
    for (int64_t f = 0; f < F; ++f) {
      const double gate = dot(gate_up + f * D, x, D), up = dot(gate_up + (F + f) * D, x, D);
      act[static_cast<size_t>(f)] = gate / (1 + std::exp(-gate)) * up * score[static_cast<size_t>(e)] / total;
    }
    for (int64_t d = 0; d < D; ++d)
      y[static_cast<size_t>(d)] += dot(layer.weights.down_EDF.f32() + (e * D + d) * F, act.data(), F);
  }
  return y;
}

// sum of y * dy, the scalar whose gradient backward gives.
double projected(const Layer& layer, const std::vector<float>& dy) {
  double sum = 0;
  for (int64_t t = 0; t < kTokens; ++t) {
    const auto y = direct_output(layer, t);
    for (size_t d = 0; d < y.size(); ++d)
      sum += y[d] * static_cast<double>(dy[static_cast<size_t>(t) * y.size() + d]);
  }
  return sum;
}

void check_gradient(Layer& layer, const std::vector<float>& dy, const TensorView& values,
                    const TensorView& gradient, const char* name) {
  constexpr double kStep = 1.0 / 1024;
  const int64_t stride = std::max<int64_t>(1, values.num_elements() / 61);
  double scale = 0;
  for (int64_t i = 0; i < gradient.num_elements(); ++i)
    scale = std::max(scale, std::abs(static_cast<double>(gradient.f32()[i])));
  for (int64_t i = 0; i < values.num_elements(); i += stride) {
    const float start = values.f32()[i];
    values.f32()[i] = start + static_cast<float>(kStep);
    const double high_at = static_cast<double>(values.f32()[i]), high = projected(layer, dy);
    values.f32()[i] = start - static_cast<float>(kStep);
    const double low_at = static_cast<double>(values.f32()[i]), low = projected(layer, dy);
    values.f32()[i] = start;
    EXPECT_NEAR(static_cast<double>(gradient.f32()[i]), (high - low) / (high_at - low_at),
                2e-4 * scale + 1e-9)
        << name << " element " << i;
  }
}

const LayerCase kCases[] = {
    {},
    {.avoided = 2},
    {.shape = {.width = 12, .expert_width = 10, .experts = 4, .top_k = 1}, .favourite = 3},
    {.shape = {.width = 12, .expert_width = 10, .experts = 4, .top_k = 1}},
    {.shape = {.width = 12, .expert_width = 10, .experts = 4, .top_k = 4}},
    {.shape = {.width = 5, .expert_width = 3, .experts = 1, .top_k = 1}},
};

class MoeLayer : public ::testing::TestWithParam<std::tuple<LayerCase, ExpertFfnMode>> {};

TEST_P(MoeLayer, ForwardEqualsTheDefinition) {
  const LayerCase c = std::get<0>(GetParam());
  Layer layer(c, std::get<1>(GetParam()));
  layer.forward();
  for (int64_t t = 0; t < kTokens; ++t) {
    const auto want = direct_output(layer, t);
    for (size_t d = 0; d < want.size(); ++d) {
      ASSERT_NEAR(static_cast<double>(layer.y.f32()[static_cast<size_t>(t) * want.size() + d]), want[d], 3e-6)
          << "token " << t;
    }
  }
  const int64_t* counts = layer.stats.counts_E.i64();
  EXPECT_EQ(std::accumulate(counts, counts + c.shape.experts, int64_t{0}), kTokens * c.shape.top_k);
  if (c.favourite >= 0) {
    EXPECT_EQ(counts[c.favourite], kTokens);
  }
  if (c.avoided >= 0) {
    EXPECT_EQ(counts[c.avoided], 0);
  }
}

TEST_P(MoeLayer, BackwardEqualsCentralDifferences) {
  const LayerCase c = std::get<0>(GetParam());
  Layer layer(c, std::get<1>(GetParam()));
  layer.forward();
  std::vector<float> dy(static_cast<size_t>(kTokens * c.shape.width));
  const Rng rng(9, RngStream::kTest);
  for (size_t i = 0; i < dy.size(); ++i) dy[i] = static_cast<float>(rng.normal(i));
  std::vector<float> dx(dy.size(), NAN);
  const Shape shape{kTokens, c.shape.width};
  moe_backward(layer.ctx, layer.mode, layer.shape, layer.weights, layer.gradients, layer.saved,
               layer.workspace,
               {.x_TD = layer.x,
                .dy_TD = TensorView(dy.data(), DType::kF32, shape),
                .dx_TD = TensorView(dx.data(), DType::kF32, shape),
                .balance_E = {},
                .z_scale = 0});
  check_gradient(layer, dy, layer.x, TensorView(dx.data(), DType::kF32, shape), "x");
  check_gradient(layer, dy, layer.weights.gate_up_E2FD, layer.gradients.gate_up_E2FD, "gate_up");
  check_gradient(layer, dy, layer.weights.down_EDF, layer.gradients.down_EDF, "down");
  check_gradient(layer, dy, layer.weights.gate_ED, layer.gradients.gate_ED, "gate");
  if (c.avoided >= 0) {
    const int64_t size = 2 * c.shape.expert_width * c.shape.width;
    const float* unused = layer.gradients.gate_up_E2FD.f32() + c.avoided * size;
    EXPECT_TRUE(std::all_of(unused, unused + size, [](float value) { return value == 0.0f; }));
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, MoeLayer,
                         ::testing::Combine(::testing::ValuesIn(kCases),
                                            ::testing::Values(ExpertFfnMode::kLoop,
                                                              ExpertFfnMode::kGroupedLinear,
                                                              ExpertFfnMode::kFusedGroupedMlp)));

}  // namespace
}  // namespace biomoe
