// Whole steps on the GPU in which every token goes to the same expert: beside the CPU in BF16, and beside the
// emulation in codes.
#include "biomoe/train/model_image.h"
#include "biomoe/train/train_step.h"
#include "tests/cuda/gpu_test.h"
#include "tests/cuda_model/gpu_model.h"

namespace biomoe::test {
namespace {

// All tokens go to expert 3 or, where a token has two, to 3 and 1.
bool chosen(const ModelConfig& config, int64_t expert) {
  return expert == 3 || (config.num_experts_per_tok == 2 && expert == 1);
}

ModelConfig one_expert_config(int64_t top_k) {
  ModelConfig config = coded_config();
  config.num_experts_per_tok = top_k;
  return config;
}

// A share of the router's logits that all tokens have, from column 0 of the residual stream, which is large
// and which nothing else reads. It decides who is chosen, far above what differs by token.
void force_routing(const Model& model, float* weights) {
  constexpr float kShared = 16.0f, kLogit = 8.0f;
  const int64_t width = model.config().hidden_size;
  // What a norm makes of the component, about.
  const float normed = std::sqrt(static_cast<float>(width)) * 0.8f;
  const auto column = [&](const ParamSpec& spec, int64_t row) {
    if (spec.kind == ParamKind::kEmbedding) return kShared;
    if (spec.kind != ParamKind::kRouter) return 0.0f;
    return chosen(model.config(), row) ? kLogit / normed : 0.0f;
  };
  for (const ParamSpec& spec : model.parameters().specs()) {
    if (spec.kind == ParamKind::kNorm) continue;
    float* values = weights + spec.offset;
    if (spec.name.ends_with("o_proj.weight")) {  // these two write to the stream: not to column 0
      std::fill_n(values, spec.shape[1], 0.0f);
    } else if (spec.name.ends_with("down_proj")) {
      for (int64_t e = 0; e < spec.shape[0]; ++e) {
        std::fill_n(values + e * spec.shape[1] * spec.shape[2], spec.shape[2], 0.0f);
      }
    } else {
      for (int64_t row = 0; row < spec.num_elements() / width; ++row) values[row * width] = column(spec, row);
    }
  }
}

// One step, of an optimiser whose update is about the gradient itself: moments are far below its eps.
class OneExpertRun {
 public:
  OneExpertRun(Device device, int64_t top_k, ExpertFfnMode mode, const Fp8Config& fp8 = {}) {
    ModelLimits limits = small_limits();
    limits.device = device;
    limits.expert_ffn_mode = mode;
    limits.fp8 = fp8;
    AdamwConfig adamw;
    adamw.eps = 1.0;
    adamw.weight_decay = 0.0;
    model_ = std::make_unique<Model>(one_expert_config(top_k), limits);
    optimizer_ = std::make_unique<Optimizer>(model_->parameters(), adamw, OptimizerOptions{.device = device});
    image_ = std::make_unique<ModelImage>(*model_, optimizer_.get());
    image_->initialize(3);
    force_routing(*model_, image_->weights());
    image_->upload_sync();
    before_ = weights();
    StepRunner runner(*model_, *optimizer_, false);
    const Batch batch = random_batch(model_->config(), {130, 1, 64, 205}, 7);
    runner.submit({&batch, 1}, {.step = 1, .lr = 1.0, .max_grad_norm = 1.0, .poison_activations = true});
    result = runner.finish_sync();
    runner.settle();
  }

  // Every token's rows are those of the experts that the router was made to choose.
  void expect_routing() const {
    const RoutingStats routing = model_->routing();
    const int64_t experts = routing.counts_LE.shape[1];
    for (int64_t layer = 0; layer < routing.counts_LE.shape[0]; ++layer) {
      for (int64_t e = 0; e < experts; ++e) {
        EXPECT_EQ(routing.counts_LE.i64()[layer * experts + e],
                  chosen(model_->config(), e) ? routing.tokens : 0)
            << "layer " << layer << ", expert " << e;
      }
    }
  }

  // What the step added to each parameter, without the gaps between them.
  std::vector<float> update() {
    std::vector<float> change = weights();
    for (size_t i = 0; i < change.size(); ++i) change[i] -= before_[i];
    return change;
  }
  // Of experts that no token went to nothing changes.
  void expect_idle_experts_unchanged() {
    const std::vector<float> change = update();
    size_t begin = 0;
    for (const ParamSpec& spec : model_->parameters().specs()) {
      const auto size = static_cast<size_t>(spec.num_elements());
      const auto experts = static_cast<size_t>(spec.shape[0]);
      for (size_t i = 0; spec.kind == ParamKind::kExpert && i < size; ++i) {
        const auto e = static_cast<int64_t>(i / (size / experts));
        if (chosen(model_->config(), e)) continue;
        ASSERT_EQ(change[begin + i], 0.0f) << spec.name << ", expert " << e << ", element " << i;
      }
      begin += size;
    }
  }
  const Fp8State& fp8_state() const { return model_->fp8_state(); }

  StepResult result;

 private:
  std::vector<float> weights() {
    image_->download_sync();
    std::vector<float> values;
    for (const auto& spec : model_->parameters().specs()) {
      const float* from = image_->weights() + spec.offset;
      values.insert(values.end(), from, from + spec.num_elements());
    }
    return values;
  }

  std::unique_ptr<Model> model_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<ModelImage> image_;
  std::vector<float> before_;
};

double cosine(const std::vector<float>& a, const std::vector<float>& b) {
  const double dot = std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
  return dot / std::sqrt(std::inner_product(a.begin(), a.end(), a.begin(), 0.0) *
                         std::inner_product(b.begin(), b.end(), b.begin(), 0.0));
}

struct Case {
  int64_t top_k;
  ExpertFfnMode mode;
};

void PrintTo(const Case& c, std::ostream* to) {
  *to << kExpertFfnModeNames[static_cast<size_t>(c.mode)] << ", " << c.top_k << " experts a token";
}

class CudaOneExpertTest : public GpuTest, public testing::WithParamInterface<Case> {};

TEST_P(CudaOneExpertTest, AStepFollowsTheCpu) {
  const auto [top_k, mode] = GetParam();
  if (mode != ExpertFfnMode::kLoop && device_info(Device::kCuda).compute_capability != 90) {
    GTEST_SKIP() << "products of all experts at once need compute capability 9.0";
  }
  OneExpertRun gpu(Device::kCuda, top_k, mode), cpu(Device::kCpu, top_k, mode);
  gpu.expect_routing();
  cpu.expect_routing();
  EXPECT_NEAR(gpu.result.lm_loss, cpu.result.lm_loss, 1e-2);
  EXPECT_NEAR(gpu.result.aux_loss, cpu.result.aux_loss, 1e-2 * cpu.result.aux_loss);
  EXPECT_NEAR(gpu.result.z_loss, cpu.result.z_loss, 1e-2 * cpu.result.z_loss);
  EXPECT_NEAR(gpu.result.grad_norm, cpu.result.grad_norm, 2e-2 * cpu.result.grad_norm);
  const std::vector<float> got = gpu.update(), want = cpu.update();
  EXPECT_GT(cosine(got, want), 0.999);
  EXPECT_LE(norm_error(got, want), 5e-2);
  gpu.expect_idle_experts_unchanged();
}

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const int64_t top_k : {1, 2}) {
    for (const auto mode :
         {ExpertFfnMode::kLoop, ExpertFfnMode::kGroupedLinear, ExpertFfnMode::kFusedGroupedMlp}) {
      all.push_back({top_k, mode});
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Cases, CudaOneExpertTest, testing::ValuesIn(cases()));

class CudaOneExpertFp8Test : public HopperTest, public testing::WithParamInterface<Case> {};

TEST_P(CudaOneExpertFp8Test, AStepFollowsTheEmulation) {
  const auto [top_k, mode] = GetParam();
  Fp8Config fp8;
  fp8.enabled = true;
  fp8.fp8_recipe = Fp8Recipe::kFloat8BlockScaling;
  OneExpertRun native(Device::kCuda, top_k, mode, fp8);
  fp8.fp8_recipe_kwargs.emulate = true;
  OneExpertRun emulated(Device::kCuda, top_k, mode, fp8);
  const auto of_experts = [](const OneExpertRun& run) {
    return run.fp8_state().describe().find("gate and up native") != std::string::npos;
  };
  EXPECT_FALSE(of_experts(emulated)) << emulated.fp8_state().describe();
  EXPECT_EQ(of_experts(native), mode != ExpertFfnMode::kLoop) << native.fp8_state().describe();
  native.expect_routing();
  emulated.expect_routing();
  EXPECT_NEAR(native.result.lm_loss, emulated.result.lm_loss, 1e-2);
  EXPECT_NEAR(native.result.aux_loss, emulated.result.aux_loss, 1e-2 * emulated.result.aux_loss);
  EXPECT_NEAR(native.result.grad_norm, emulated.result.grad_norm, 5e-2 * emulated.result.grad_norm);
  EXPECT_GT(cosine(native.update(), emulated.update()), 0.99);
  native.expect_idle_experts_unchanged();
}

INSTANTIATE_TEST_SUITE_P(Cases, CudaOneExpertFp8Test, testing::ValuesIn(cases()));

}  // namespace
}  // namespace biomoe::test
