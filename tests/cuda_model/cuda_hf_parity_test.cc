// The model on the GPU, in BF16, against what `transformers` computes in fp32 (or in the checkpoint's type).
#include "biomoe/checkpoint/hf_import.h"
#include "biomoe/model/parameter_io.h"
#include "biomoe/train/model_image.h"
#include "tests/cuda/gpu_tensor.h"
#include "tests/hf/hf_golden.h"

namespace biomoe {
namespace {

using namespace test;

double cosine(const float* got, const std::vector<float>& want) {
  double dot = 0, a = 0, b = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    dot += static_cast<double>(got[i]) * static_cast<double>(want[i]);
    a += static_cast<double>(got[i]) * static_cast<double>(got[i]);
    b += static_cast<double>(want[i]) * static_cast<double>(want[i]);
  }
  return a == 0 && b == 0 ? 1.0 : dot / std::sqrt(a * b);
}

class CudaHfParity : public ::testing::TestWithParam<std::tuple<fs::path, ExpertFfnMode>> {};

TEST_P(CudaHfParity, LogitsLossesAndGradients) {
  BIOMOE_REQUIRE_GPU();
  const auto& [folder, mode] = GetParam();
  const SafetensorsFile golden(folder / "golden.safetensors");
  const Batch batch = batch_of(golden);
  const HfConfig source = read_hf_config(folder);
  Model model(source.model, {.max_tokens = batch.num_tokens(),
                             .max_seqlen = golden.at("input_ids").shape[1],
                             .num_threads = 2,
                             .training = true,
                             .expert_ffn_mode = mode,
                             .rope_frequency_dtype = source.dtype.value_or(DType::kF32),
                             .device = Device::kCuda});
  ModelImage image(model, nullptr);
  import_hf(folder, source.model, model.parameters(), image.weights());
  image.upload_sync();
  const double scale = 1.0 / batch.target_weight, coef = source.model.router_aux_loss_coef;
  model.poison_activations();
  model.start_step(scale);
  model.reset_sums();
  const DeviceBatch& views = model.upload(batch);
  model.forward(views);
  model.loss(views, true);
  model.backward(views, coef, 0.0);
  model.finish_step(coef);
  device_wait_sync(model.context());
  const StepSums sums = model.sums();
  EXPECT_NEAR(sums.loss.weighted_nll * scale, static_cast<double>(read_values(golden, "lm_loss")[0]), 1e-2);
  EXPECT_NEAR(sums.balance_loss, static_cast<double>(read_values(golden, "aux_loss")[0]), 5e-2);

  ParameterIo io(model.context(), model.types());
  std::vector<float> gradients(static_cast<size_t>(model.parameters().arena_elements()));
  for (const auto& spec : model.parameters().specs()) {
    io.read_sync(spec, model.gradients_A(), gradients.data() + spec.offset);
  }
  int64_t compared = 0;
  for (const auto& entry : golden.entries()) {
    if (entry.name.rfind("grad.", 0) != 0) continue;
    const Slice slice = slice_of(model.parameters(), model.config(), entry.name.substr(5));
    const double similarity =
        cosine(gradients.data() + slice.spec->offset + slice.offset, read_values(golden, entry.name));
    EXPECT_GT(similarity, 0.999) << entry.name;
    compared += entry.num_elements();
  }
  EXPECT_GE(compared, model.parameters().num_parameters());

  std::vector<float> logits(static_cast<size_t>(batch.num_tokens() * source.model.vocab_size));
  model.forward(model.upload(batch), false);
  model.logits_sync(TensorView(logits.data(), DType::kF32, {batch.num_tokens(), source.model.vocab_size}));
  const double error = relative_error(logits.data(), read_values(golden, "logits"));
  RecordProperty("logits_error", std::to_string(error));
  EXPECT_LE(error, 2e-2);
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CudaHfParity);
INSTANTIATE_TEST_SUITE_P(Goldens, CudaHfParity,
                         ::testing::Combine(::testing::ValuesIn(golden_folders()),
                                            ::testing::Values(ExpertFfnMode::kLoop,
                                                              ExpertFfnMode::kGroupedLinear,
                                                              ExpertFfnMode::kFusedGroupedMlp)),
                         [](const auto& instance) {
                           return case_name(std::get<0>(instance.param)) + "_" +
                                  std::string(
                                      kExpertFfnModeNames[static_cast<size_t>(std::get<1>(instance.param))]);
                         });

}  // namespace
}  // namespace biomoe
