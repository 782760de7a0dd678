// Whole steps on the GPU: against the CPU, recorded against not recorded, micro-batches, recomputation, the
// places of faults, and how often the host waits.
#include <gmock/gmock.h>

#include "biomoe/model/parameter_io.h"
#include "biomoe/train/model_image.h"
#include "biomoe/train/train_step.h"
#include "tests/cuda/gpu_test.h"
#include "tests/unit/model/model_test_util.h"

namespace biomoe {
namespace {

using namespace test;

ModelConfig gpu_config() {
  ModelConfig config = small_config();
  config.hidden_size = 64;
  config.intermediate_size = 96;
  config.num_attention_heads = 4;
  config.num_key_value_heads = 2;
  config.head_dim = 16;
  config.initializer_range = 0.1;  // larger weights amplify the rounding of BF16 from layer to layer
  return config;
}

// A model, its optimiser and the image of both, from a seed.
struct DeviceRun {
  DeviceRun(const ModelConfig& config, ModelLimits limits, Device device, bool remainders = false) {
    limits.device = device;
    model = std::make_unique<Model>(config, limits);
    optimizer =
        std::make_unique<Optimizer>(model->parameters(), AdamwConfig{},
                                    OptimizerOptions{.device = device, .store_param_remainders = remainders});
    image = std::make_unique<ModelImage>(*model, optimizer.get());
    image->initialize(3);
    image->upload_sync();
  }
  StepResult step(StepRunner& runner, std::span<const Batch> batches, int64_t number) {
    runner.submit(batches,
                  {.step = number, .lr = 3e-3, .max_grad_norm = 1.0, .poison_activations = number == 1});
    return runner.finish_sync();
  }
  std::vector<float> weights() {
    image->download_sync();
    std::vector<float> values;
    for (const auto& spec : model->parameters().specs()) {
      values.insert(values.end(), image->weights() + spec.offset,
                    image->weights() + spec.offset + spec.num_elements());
    }
    return values;
  }
  std::vector<float> gradients() {
    std::vector<float> values;
    ParameterIo io(model->context(), model->types());
    for (const auto& spec : model->parameters().specs()) {
      const size_t begin = values.size();
      values.resize(begin + static_cast<size_t>(spec.num_elements()));
      io.read_sync(spec, model->gradients_A(), values.data() + begin);
    }
    return values;
  }
  std::unique_ptr<Model> model;
  std::unique_ptr<Optimizer> optimizer;
  std::unique_ptr<ModelImage> image;
};

double cosine(const std::vector<float>& a, const std::vector<float>& b) {
  double dot = 0, aa = 0, bb = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    dot += static_cast<double>(a[i]) * static_cast<double>(b[i]);
    aa += static_cast<double>(a[i]) * static_cast<double>(a[i]);
    bb += static_cast<double>(b[i]) * static_cast<double>(b[i]);
  }
  return dot / std::sqrt(aa * bb);
}

TEST(CudaImage, WeightsAndMomentsComeBackAsTheyWent) {
  BIOMOE_REQUIRE_GPU();
  DeviceRun run(gpu_config(), small_limits(), Device::kCuda);
  const std::vector<float> before = run.weights();
  DeviceRun again(gpu_config(), small_limits(), Device::kCpu);
  EXPECT_EQ(before, again.weights()) << "fp32 masters, in the hub's layout";
}

// Every token goes to every expert: with fewer, rounding to BF16 turns near ties, and what comes after is
// another computation.
TEST(CudaStep, FollowsTheCpu) {
  BIOMOE_REQUIRE_GPU();
  ModelConfig config = gpu_config();
  config.num_experts_per_tok = config.num_local_experts;
  const Batch batch = random_batch(gpu_config(), {130, 1, 64, 205}, 7);
  for (const auto mode :
       {ExpertFfnMode::kLoop, ExpertFfnMode::kGroupedLinear, ExpertFfnMode::kFusedGroupedMlp}) {
    ModelLimits limits = small_limits();
    limits.expert_ffn_mode = mode;
    DeviceRun gpu(config, limits, Device::kCuda), cpu(config, limits, Device::kCpu);
    StepRunner on_gpu(*gpu.model, *gpu.optimizer, false), on_cpu(*cpu.model, *cpu.optimizer, false);
    const StepResult got = gpu.step(on_gpu, {&batch, 1}, 1), want = cpu.step(on_cpu, {&batch, 1}, 1);
    EXPECT_NEAR(got.lm_loss, want.lm_loss, 1e-2);
    EXPECT_EQ(got.targets, want.targets);
    EXPECT_NEAR(got.grad_norm, want.grad_norm, 2e-2 * want.grad_norm);
    EXPECT_GT(cosine(gpu.gradients(), cpu.gradients()), 0.999)
        << kExpertFfnModeNames[static_cast<size_t>(mode)];
  }
}

// Every kernel of this step runs on any GPU from compute capability 8.0 on.
TEST(CudaStep, OfPortableKernelsFollowsTheCpuAndRepeats) {
  BIOMOE_REQUIRE_GPU();
  ModelConfig config = gpu_config();
  config.num_experts_per_tok = config.num_local_experts;
  config.sliding_window = 90;
  const Batch batch = random_batch(gpu_config(), {130, 1, 64, 205}, 7);
  ModelLimits limits = small_limits();
  limits.expert_ffn_mode = ExpertFfnMode::kLoop;
  limits.portable_kernels = true;
  limits.deterministic = true;
  limits.recompute_layers = 2;
  DeviceRun gpu(config, limits, Device::kCuda), again(config, limits, Device::kCuda),
      cpu(config, limits, Device::kCpu);
  StepRunner on_gpu(*gpu.model, *gpu.optimizer, false), on_gpu_again(*again.model, *again.optimizer, false),
      on_cpu(*cpu.model, *cpu.optimizer, false);
  const StepResult got = gpu.step(on_gpu, {&batch, 1}, 1), want = cpu.step(on_cpu, {&batch, 1}, 1);
  EXPECT_NEAR(got.lm_loss, want.lm_loss, 1e-2);
  EXPECT_NEAR(got.grad_norm, want.grad_norm, 2e-2 * want.grad_norm);
  EXPECT_GT(cosine(gpu.gradients(), cpu.gradients()), 0.999);
  again.step(on_gpu_again, {&batch, 1}, 1);
  on_gpu.settle();
  on_gpu_again.settle();
  EXPECT_EQ(gpu.weights(), again.weights());
}

TEST(CudaStep, TheNormFromTheProductsIsThatOfTheGradients) {
  BIOMOE_REQUIRE_GPU();
  ModelLimits limits = small_limits();
  limits.expert_ffn_mode = ExpertFfnMode::kGroupedLinear;
  ModelConfig config = gpu_config();
  config.hidden_size = 320;  // two tiles of columns, and a part of a tile of rows
  for (const std::vector<int64_t>& lengths : {std::vector<int64_t>{130, 1, 64, 205}, {1}}) {
    const Batch batch = random_batch(config, lengths, 7);
    DeviceRun run(config, limits, Device::kCuda);
    StepRunner runner(*run.model, *run.optimizer, false);
    const StepResult got = run.step(runner, {&batch, 1}, 1);
    EXPECT_FALSE(run.model->gradient_squares().empty());
    double sum = 0;
    for (const float g : run.gradients()) sum += static_cast<double>(g) * static_cast<double>(g);
    EXPECT_NEAR(got.grad_norm, std::sqrt(sum), 1e-6 * std::sqrt(sum));
  }
}

TEST(CudaStep, ARecordedStepIsTheStepItself) {
  BIOMOE_REQUIRE_GPU();
  ModelLimits limits = small_limits();
  limits.expert_ffn_mode = ExpertFfnMode::kFusedGroupedMlp;
  limits.deterministic = true;
  limits.micro_batches = 2;
  std::vector<std::vector<Batch>> steps;
  for (uint64_t i = 0; i < 8; ++i) {
    const int64_t shift = static_cast<int64_t>(i % 3) * 5;
    steps.push_back({random_batch(gpu_config(), {200 - shift, 100 + shift}, 10 + i),
                     random_batch(gpu_config(), {50, 120, 30}, 50 + i)});
  }
  DeviceRun plain(gpu_config(), limits, Device::kCuda), recorded(gpu_config(), limits, Device::kCuda);
  StepRunner runner(*plain.model, *plain.optimizer, false),
      recorder(*recorded.model, *recorded.optimizer, true);
  for (size_t i = 0; i < steps.size(); ++i) {
    const auto number = static_cast<int64_t>(i) + 1;
    const StepResult want = plain.step(runner, steps[i], number),
                     got = recorded.step(recorder, steps[i], number);
    EXPECT_EQ(got.loss, want.loss) << number;
    EXPECT_EQ(got.grad_norm, want.grad_norm) << number;
    EXPECT_EQ(got.aux_loss, want.aux_loss) << number;
  }
  runner.settle();
  recorder.settle();
  EXPECT_EQ(recorded.weights(), plain.weights());
}

// Masters in one piece and in two are the same numbers, and so is everything that follows from them: through
// whole steps, and where one run goes on from the other's checkpoint.
TEST(CudaStep, RemaindersOfMastersTrainAsMastersDoBitForBit) {
  BIOMOE_REQUIRE_GPU();
  ModelLimits limits = small_limits();
  limits.expert_ffn_mode = ExpertFfnMode::kFusedGroupedMlp;
  limits.deterministic = true;
  DeviceRun whole(gpu_config(), limits, Device::kCuda), parts(gpu_config(), limits, Device::kCuda, true);
  ASSERT_TRUE(whole.optimizer->master_A() && !whole.optimizer->remainder_A());
  ASSERT_TRUE(parts.optimizer->remainder_A() && !parts.optimizer->master_A());
  EXPECT_EQ(parts.weights(), whole.weights());
  StepRunner on_whole(*whole.model, *whole.optimizer, true), on_parts(*parts.model, *parts.optimizer, true);
  const auto same_steps = [&](int64_t first, int64_t last) {
    for (int64_t number = first; number <= last; ++number) {
      const Batch batch = random_batch(gpu_config(), {200, 100, 17}, static_cast<uint64_t>(number));
      const StepResult want = whole.step(on_whole, {&batch, 1}, number),
                       got = parts.step(on_parts, {&batch, 1}, number);
      ASSERT_EQ(got.loss, want.loss) << number;
      ASSERT_EQ(got.grad_norm, want.grad_norm) << number;
    }
    on_whole.settle();
    on_parts.settle();
  };
  same_steps(1, 20);
  const std::vector<float> masters = whole.weights();
  ASSERT_EQ(parts.weights(), masters);
  size_t finer = 0;
  for (const float value : masters) finer += value != float_from_bf16(bf16_from_float(value)) ? 1 : 0;
  EXPECT_GT(finer, masters.size() / 2) << "masters hold more than bf16 does";
  // Each takes up what the other left.
  const auto groups = [](DeviceRun& run) { return run.image->groups(); };
  for (size_t g = 0; g < groups(whole).size(); ++g) {
    for (size_t t = 0; t < groups(whole)[g].tensors.size(); ++t) {
      const TensorView a = groups(whole)[g].tensors[t].view;
      const TensorView b = groups(parts)[g].tensors[t].view;
      ASSERT_EQ(std::memcmp(a.data, b.data, a.bytes()), 0) << groups(whole)[g].tensors[t].name;
      std::vector<uint8_t> held(static_cast<const uint8_t*>(a.data),
                                static_cast<const uint8_t*>(a.data) + a.bytes());
      std::memcpy(a.data, b.data, a.bytes());
      std::memcpy(b.data, held.data(), held.size());
    }
  }
  whole.image->upload_sync();
  parts.image->upload_sync();
  same_steps(21, 25);
  EXPECT_EQ(parts.weights(), whole.weights());
}

// An update that is left to the next step is the one that is made at once.
class CudaHopperStep : public HopperTest {};

TEST_F(CudaHopperStep, MakesTheUpdateOfTheStepBefore) {
  ModelConfig config = gpu_config();
  config.hidden_size = 512;
  config.intermediate_size = 1024;
  config.num_local_experts = 4;
  config.num_hidden_layers = 3;
  for (const bool remainders : {false, true}) {
    ModelLimits limits = small_limits();
    limits.max_tokens = limits.max_seqlen = 4096;
    limits.expert_ffn_mode = ExpertFfnMode::kFusedGroupedMlp;
    limits.deterministic = true;
    DeviceRun left(config, limits, Device::kCuda, remainders),
        made(config, limits, Device::kCuda, remainders);
    StepRunner leaves(*left.model, *left.optimizer, true), makes(*made.model, *made.optimizer, true);
    for (int64_t number = 1; number <= 6; ++number) {
      const Batch batch = random_batch(config, {4096 - number}, static_cast<uint64_t>(number));
      const StepResult want = made.step(makes, {&batch, 1}, number),
                       got = left.step(leaves, {&batch, 1}, number);
      makes.settle();
      EXPECT_EQ(got.loss, want.loss) << number;
      EXPECT_EQ(got.grad_norm, want.grad_norm) << number;
    }
    leaves.settle();
    EXPECT_EQ(left.weights(), made.weights());
  }
}

TEST(CudaStep, MicroBatchesAndRecomputationGiveTheSameGradient) {
  BIOMOE_REQUIRE_GPU();
  const Batch whole = random_batch(gpu_config(), {130, 90, 64}, 7);
  std::vector<Batch> parts;
  for (int64_t b = 0; b < 3; ++b) parts.push_back(sequence_of(whole, b));
  ModelLimits limits = small_limits();
  DeviceRun one(gpu_config(), limits, Device::kCuda);
  StepRunner first(*one.model, *one.optimizer, false);
  const StepResult want = one.step(first, {&whole, 1}, 1);
  limits.micro_batches = 3;
  limits.recompute_layers = 2;
  DeviceRun three(gpu_config(), limits, Device::kCuda);
  StepRunner second(*three.model, *three.optimizer, false);
  const StepResult got = three.step(second, parts, 1);
  EXPECT_NEAR(got.lm_loss, want.lm_loss, 5e-3);
  EXPECT_NEAR(got.aux_loss, want.aux_loss, 1e-3);
  EXPECT_GT(cosine(three.gradients(), one.gradients()), 0.999);
}

TEST(CudaStep, TheHostWaitsOnceAStep) {
  BIOMOE_REQUIRE_GPU();
  ModelLimits limits = small_limits();
  limits.expert_ffn_mode = ExpertFfnMode::kGroupedLinear;
  DeviceRun run(gpu_config(), limits, Device::kCuda);
  StepRunner runner(*run.model, *run.optimizer, true);
  const Batch batch = random_batch(gpu_config(), {300, 100}, 7);
  for (int64_t number = 1; number <= 3; ++number) run.step(runner, {&batch, 1}, number);
  for (int64_t number = 4; number <= 6; ++number) {
    const int64_t before = device_sync_calls();
    runner.submit({&batch, 1}, {.step = number, .lr = 1e-3, .max_grad_norm = 1.0});
    EXPECT_EQ(device_sync_calls(), before) << "submit";
    runner.finish_sync();
    EXPECT_EQ(device_sync_calls(), before + 1) << "finish";
  }
}

TEST(CudaStep, AFaultStopsBeforeTheUpdateAndIsNamed) {
  BIOMOE_REQUIRE_GPU();
  DeviceRun run(gpu_config(), small_limits(), Device::kCuda);
  StepRunner runner(*run.model, *run.optimizer, true);
  const Batch batch = random_batch(gpu_config(), {60}, 14);
  const auto& spec = run.model->parameters().find("model.layers.1.self_attn.v_proj.weight");
  ParameterIo io(run.model->context(), run.model->types());
  const std::vector<float> bad(static_cast<size_t>(spec.num_elements()), NAN);
  io.write_sync(spec, bad.data(), run.model->weights_A());
  run.model->weights_changed();
  const std::vector<float> before = run.weights();
  try {
    run.step(runner, {&batch, 1}, 5);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("step 5"));
    EXPECT_THAT(error.what(), ::testing::HasSubstr("layer 1 attention"));
  }
  EXPECT_EQ(run.weights(), before);
}

}  // namespace
}  // namespace biomoe
