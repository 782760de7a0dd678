// Training with native products of codes: beside the emulation of the same recipe, recorded, over
// micro-batches, and with weights that change under their codes.
#include <gmock/gmock.h>

#include "biomoe/train/model_image.h"
#include "biomoe/train/train_step.h"
#include "tests/cuda/gpu_test.h"
#include "tests/cuda_model/gpu_model.h"

namespace biomoe::test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class CudaNativeFp8 : public HopperTest {
 protected:
  const std::vector<Batch> batches_{random_batch(native_config(), {130, 1, 64, 205}, 7),
                                    random_batch(native_config(), {77, 300}, 8)};
};

TEST_F(CudaNativeFp8, FollowsTheEmulation) {
  for (const auto mode : {ExpertFfnMode::kGroupedLinear, ExpertFfnMode::kFusedGroupedMlp}) {
    NativeRun native(false, 1, false, mode), emulated(true, 1, false, mode);
    EXPECT_THAT(native.model->fp8_state().describe(),
                HasSubstr("from attention native; gate and up native; down native"));
    EXPECT_THAT(emulated.model->fp8_state().describe(), Not(HasSubstr("native")));
    double first = 0, last = 0;
    bool same = true;
    for (int step = 0; step < 12; ++step) {
      emulated.take_weights(native);
      const StepResult got = native.step({batches_.data(), 1}), want = emulated.step({batches_.data(), 1});
      EXPECT_NEAR(got.lm_loss, want.lm_loss, 1e-2) << "step " << step;
      EXPECT_NEAR(got.grad_norm, want.grad_norm, 5e-2 * want.grad_norm) << "step " << step;
      same = same && got.lm_loss == want.lm_loss;
      if (step == 0) first = got.lm_loss;
      last = got.lm_loss;
    }
    EXPECT_FALSE(same) << "the two ways sum differently";
    EXPECT_LT(last, first - 0.1) << "too little was learnt for old codes to show";
  }
}

// The same codes go into the same products, but for what is kept of gate and up in fewer bits; the
// probabilities' gradients are summed in another order.
TEST_F(CudaNativeFp8, FusedProductsAreThoseThatAreNotFused) {
  NativeRun fused(false), apart(false, 1, false, ExpertFfnMode::kGroupedLinear);
  for (int step = 0; step < 4; ++step) {
    apart.take_weights(fused);
    const StepResult got = fused.step({batches_.data(), 1}), want = apart.step({batches_.data(), 1});
    EXPECT_EQ(got.lm_loss, want.lm_loss) << "step " << step;
    EXPECT_NEAR(got.grad_norm, want.grad_norm, 1e-3 * want.grad_norm) << "step " << step;
  }
}

// Where experts' products are of MX codes there are no others of all experts at once: the emulation is a
// loop.
TEST(CudaNativeMxfp8, FollowsTheEmulation) {
  BIOMOE_REQUIRE_GPU();
  if (!device_info(Device::kCuda).mx_products) {
    GTEST_SKIP() << "products of MX codes need compute capability 10.0 and BIOMOE_SM100=ON";
  }
  constexpr Fp8Recipe kRecipe = Fp8Recipe::kMxfp8BlockScaling;
  const std::vector<Batch> batches{random_batch(native_config(), {130, 1, 64, 205}, 7)};
  for (const bool record : {false, true}) {
    NativeRun native(false, 1, record, ExpertFfnMode::kGroupedLinear, kRecipe);
    NativeRun emulated(true, 1, record, ExpertFfnMode::kLoop, kRecipe);
    EXPECT_THAT(native.model->fp8_state().describe(), HasSubstr("gate and up native; down native"));
    for (int step = 0; step < 6; ++step) {
      emulated.take_weights(native);
      const StepResult got = native.step(batches), want = emulated.step(batches);
      EXPECT_NEAR(got.lm_loss, want.lm_loss, 1e-2) << "step " << step;
      EXPECT_NEAR(got.grad_norm, want.grad_norm, 5e-2 * want.grad_norm) << "step " << step;
    }
  }
}

TEST_F(CudaNativeFp8, RecordedStepsAreThePlainOnes) {
  for (const int64_t micro_batches : {1, 2}) {
    NativeRun plain(false, micro_batches), recorded(false, micro_batches, true);
    for (int step = 0; step < 5; ++step) {
      const std::span<const Batch> batches{batches_.data(), static_cast<size_t>(micro_batches)};
      const StepResult want = plain.step(batches), got = recorded.step(batches);
      EXPECT_EQ(got.lm_loss, want.lm_loss) << "step " << step;
      EXPECT_EQ(got.grad_norm, want.grad_norm) << "step " << step;
    }
  }
}

TEST_F(CudaNativeFp8, MicroBatchesFollowTheEmulation) {
  NativeRun native(false, 2), emulated(true, 2);
  for (int step = 0; step < 4; ++step) {
    emulated.take_weights(native);
    const StepResult got = native.step(batches_), want = emulated.step(batches_);
    EXPECT_NEAR(got.lm_loss, want.lm_loss, 1e-2) << "step " << step;
    EXPECT_NEAR(got.grad_norm, want.grad_norm, 5e-2 * want.grad_norm) << "step " << step;
  }
}

std::vector<uint8_t> code_bytes(Model& model) {
  std::vector<uint8_t> all;
  for (const WeightCodes& codes : model.weight_codes()) {
    if (!codes) continue;
    for (const TensorView& view : {codes.codes_EOI, codes.transposed_EIO}) {
      const size_t begin = all.size();
      all.resize(begin + view.bytes());
      copy_to_host(model.context(), all.data() + begin, view.data, view.bytes());
    }
  }
  device_wait_sync(model.context());
  return all;
}

// The update leaves the codes of the weights that it leaves: a pass outside of a step makes them from these.
TEST_F(CudaNativeFp8, TheUpdateWritesTheCodesOfTheNewWeights) {
  for (const bool record : {false, true}) {
    NativeRun run(false, 1, record);
    for (int step = 0; step < 4; ++step) {
      const std::vector<uint8_t> before = code_bytes(*run.model);
      run.step({batches_.data(), 1});
      run.runner->settle();
      const std::vector<uint8_t> after = code_bytes(*run.model);
      ASSERT_FALSE(after.empty());
      EXPECT_NE(after, before) << "step " << step;
      run.loss(batches_[0]);
      EXPECT_EQ(code_bytes(*run.model), after) << "step " << step;
    }
  }
}

TEST_F(CudaNativeFp8, WeightsThatAreLoadedGetTheirCodes) {
  for (const bool record : {false, true}) {
    NativeRun run(false, 1, record), fresh(false, 1, record);
    for (int step = 0; step < 3; ++step) run.step({batches_.data(), 1});
    run.runner->settle();
    for (NativeRun* loaded : {&run, &fresh}) {
      ModelImage image(*loaded->model, loaded->optimizer.get());
      image.initialize(11);
      image.upload_sync();
    }
    EXPECT_EQ(run.step({batches_.data(), 1}).lm_loss, fresh.step({batches_.data(), 1}).lm_loss);
  }
}

// Of a parameter that ranks update in parts none of them has all of the new weights in its update.
TEST_F(CudaNativeFp8, CodesAreWrittenOfParametersThatARankUpdatesWhole) {
  const auto coded = [](const MeshPlace& place) {
    const ParameterList parameters(native_config(), place);
    const Optimizer optimizer(parameters, AdamwConfig{}, {.device = Device::kCuda});
    int64_t experts = 0;
    for (size_t i = 0; i < parameters.specs().size(); ++i) {
      if (parameters.specs()[i].kind == ParamKind::kExpert && optimizer.writes_codes(i)) ++experts;
    }
    return experts;
  };
  const int64_t all = 2 * native_config().num_hidden_layers;
  EXPECT_EQ(coded({}), all);
  EXPECT_EQ(coded({.size = {.dp = 1, .ep = native_config().num_local_experts}}), all);
  EXPECT_LT(coded({.size = {.dp = 2, .ep = 1}}), all);
}

// An update that is left to the next step leaves the same weights and codes.
TEST_F(CudaNativeFp8, AnUpdateMayBeMadeWithTheNextStep) {
  NativeRun left(false, 1, true), made(false, 1, true);
  for (int step = 0; step < 6; ++step) {
    const StepResult want = made.step({batches_.data(), 1}), got = left.step({batches_.data(), 1});
    made.runner->settle();
    EXPECT_EQ(got.lm_loss, want.lm_loss) << "step " << step;
    EXPECT_EQ(got.grad_norm, want.grad_norm) << "step " << step;
  }
  left.runner->settle();
  EXPECT_EQ(code_bytes(*left.model), code_bytes(*made.model));
}

// After a step, recorded ones too, a forward pass sees the weights that the next step starts from.
TEST_F(CudaNativeFp8, PassesBetweenStepsSeeTheNewWeights) {
  for (const bool record : {false, true}) {
    NativeRun run(false, 1, record);
    double before = run.loss(batches_[0]);
    for (int step = 0; step < 5; ++step) {
      EXPECT_NEAR(run.step({batches_.data(), 1}).lm_loss, before, 1e-5 * before) << "step " << step;
      const double after = run.loss(batches_[0]);
      EXPECT_GT(std::abs(after - before), 1e-3) << "too little was learnt for old codes to show";
      before = after;
    }
  }
}

}  // namespace
}  // namespace biomoe::test
