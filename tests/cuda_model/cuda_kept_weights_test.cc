// Training in MXFP8 with what the weights' codes stand for kept from the update on, beside training that
// makes it for every product: the same bits.
#include "tests/cuda/gpu_test.h"
#include "tests/cuda_model/gpu_model.h"

namespace biomoe::test {
namespace {

// Rows of weights whose sizes lie far apart: beside the largest of its column's block most of a row is
// subnormal or zero, so that the two directions of products see different weights.
void spread_rows(Model& model) {
  const TensorView all = model.weights_A();
  std::vector<uint16_t> bits(static_cast<size_t>(all.num_elements()));
  copy_to_host(model.context(), bits.data(), all.data, all.bytes());
  device_wait_sync(model.context());
  for (const ParamSpec& spec : model.parameters().specs()) {
    if (spec.shape.rank() < 2) continue;
    const int64_t columns = spec.shape[spec.shape.rank() - 1];
    for (int64_t i = 0; i < spec.num_elements(); ++i) {
      uint16_t& weight = bits[static_cast<size_t>(spec.offset + i)];
      weight = bf16_from_float(std::ldexp(float_from_bf16(weight), -static_cast<int>(i / columns % 20)));
    }
  }
  copy_to_device(model.context(), all.data, bits.data(), all.bytes());
  device_wait_sync(model.context());
  model.weights_changed();
}

struct KeptCase {
  const char* name;
  ExpertFfnMode mode = ExpertFfnMode::kFusedGroupedMlp;
  int64_t micro_batches = 1;
  bool record = false;
  int64_t recompute_layers = 0;
};
void PrintTo(const KeptCase& c, std::ostream* out) {
  *out << c.name;
}

class CudaKeptWeights : public GpuTest, public testing::WithParamInterface<KeptCase> {
 protected:
  static NativeRun run(bool keep) {
    const KeptCase& c = GetParam();
    NativeRun run(true, c.micro_batches, c.record, c.mode, Fp8Recipe::kMxfp8BlockScaling,
                  [&](ModelLimits& limits) {
                    limits.fp8.fp8_recipe_kwargs.keep_weights = keep;
                    limits.recompute_layers = c.recompute_layers;
                  });
    run.lr = 1e-4;
    return run;
  }
};

TEST_P(CudaKeptWeights, AreThoseThatAreMadeForEveryProduct) {
  const std::vector<Batch> batches{random_batch(native_config(), {130, 1, 64, 205}, 7),
                                   random_batch(native_config(), {77, 300}, 8)};
  NativeRun kept = run(true), made = run(false);
  const auto keeps = [](const NativeRun& run) {
    const auto codes = run.model->weight_codes();
    return std::any_of(codes.begin(), codes.end(), [](const WeightCodes& c) { return c.mx; });
  };
  ASSERT_TRUE(keeps(kept));
  ASSERT_FALSE(keeps(made));
  EXPECT_LT(plan_model_memory(native_config(), made.model->limits()).workspace,
            plan_model_memory(native_config(), kept.model->limits()).workspace);
  for (int step = 0; step < 6; ++step) {
    if (step % 3 == 0) {  // the first weights, and some that are loaded between steps
      for (NativeRun* run : {&kept, &made}) {
        run->runner->settle();
        spread_rows(*run->model);
      }
    }
    const std::span<const Batch> of_step{batches.data(), static_cast<size_t>(GetParam().micro_batches)};
    const StepResult got = kept.step(of_step), want = made.step(of_step);
    EXPECT_EQ(got.lm_loss, want.lm_loss) << "step " << step;
    EXPECT_EQ(got.grad_norm, want.grad_norm) << "step " << step;
    if (step % 2 == 0) continue;
    EXPECT_EQ(kept.loss(batches[0]), made.loss(batches[0])) << "after step " << step;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Runs, CudaKeptWeights,
    testing::Values(KeptCase{.name = "fused"},
                    KeptCase{.name = "grouped", .mode = ExpertFfnMode::kGroupedLinear},
                    KeptCase{.name = "loop", .mode = ExpertFfnMode::kLoop},
                    KeptCase{.name = "micro_batches", .micro_batches = 2},
                    KeptCase{.name = "recorded", .record = true},
                    KeptCase{.name = "recorded_recomputed", .record = true, .recompute_layers = 1}),
    [](const auto& one) { return std::string(one.param.name); });

}  // namespace
}  // namespace biomoe::test
