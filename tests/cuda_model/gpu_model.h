// A model for tests of whole steps on the GPU.
#pragma once

#include <functional>

#include "biomoe/train/model_image.h"
#include "biomoe/train/train_step.h"
#include "tests/unit/model/model_test_util.h"

namespace biomoe::test {

// small_config() at widths that all of the GPU's kernels take, native products of codes too.
inline ModelConfig coded_config() {
  ModelConfig config = small_config();
  config.hidden_size = 128;
  config.intermediate_size = 256;
  config.head_dim = 32;
  config.initializer_range = 0.1;  // larger weights amplify the rounding of BF16 from layer to layer
  return config;
}

inline ModelConfig native_config() {
  ModelConfig config = coded_config();
  config.num_experts_per_tok = config.num_local_experts;  // no near ties of the router to turn
  return config;
}

// Steps of such a model in a recipe of 8 bits, whose products are native where they can be unless `emulate`.
struct NativeRun {
  explicit NativeRun(bool emulate, int64_t micro_batches = 1, bool record = false,
                     ExpertFfnMode mode = ExpertFfnMode::kFusedGroupedMlp,
                     Fp8Recipe recipe = Fp8Recipe::kFloat8BlockScaling,
                     const std::function<void(ModelLimits&)>& adjust = {}) {
    ModelLimits limits = small_limits();
    limits.device = Device::kCuda;
    limits.expert_ffn_mode = mode;
    limits.micro_batches = micro_batches;
    limits.deterministic = true;
    limits.fp8.enabled = true;
    limits.fp8.fp8_recipe = recipe;
    limits.fp8.fp8_recipe_kwargs.emulate = emulate;
    if (adjust) adjust(limits);
    model = std::make_unique<Model>(native_config(), limits);
    optimizer = std::make_unique<Optimizer>(model->parameters(), AdamwConfig{},
                                            OptimizerOptions{.device = Device::kCuda});
    ModelImage image(*model, optimizer.get());
    image.initialize(3);
    image.upload_sync();
    runner = std::make_unique<StepRunner>(*model, *optimizer, record);
  }
  StepResult step(std::span<const Batch> batches) {
    runner->submit(batches,
                   {.step = ++steps, .lr = lr, .max_grad_norm = 1.0, .poison_activations = steps == 1});
    return runner->finish_sync();
  }
  // So that two runs step from the same weights each time: trajectories part.
  void take_weights(const NativeRun& other) {
    other.runner->settle();
    device_wait_sync(other.model->context());
    runner->settle();
    copy_on_device(model->context(), model->weights_A().data, other.model->weights_A().data,
                   other.model->weights_A().bytes());
    device_wait_sync(model->context());
    model->weights_changed();
  }
  // Of a forward pass outside of any step.
  double loss(const Batch& batch) {
    runner->settle();
    const DeviceBatch& on_device = model->upload(batch);
    model->forward(on_device, false);
    model->loss(on_device, false);
    const TensorView nll = model->nll_sync();
    double sum = 0;
    for (int64_t t = 0; t < batch.num_tokens(); ++t) {
      sum += static_cast<double>(nll.f32()[t] * batch.loss_weights[static_cast<size_t>(t)]);
    }
    return sum / batch.target_weight;
  }
  std::unique_ptr<Model> model;
  std::unique_ptr<Optimizer> optimizer;
  std::unique_ptr<StepRunner> runner;
  int64_t steps = 0;
  double lr = 3e-3;
};

}  // namespace biomoe::test
