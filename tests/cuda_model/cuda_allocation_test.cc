// A warm step on the GPU reserves no memory, there or on the host.
#include "tests/allocation_count.h"

#include "biomoe/train/model_image.h"
#include "biomoe/train/train_step.h"
#include "tests/cuda/gpu_test.h"
#include "tests/cuda_model/gpu_model.h"

namespace biomoe::test {
namespace {

struct Case {
  const char* name;
  ExpertFfnMode mode = ExpertFfnMode::kFusedGroupedMlp;
  bool record = true;
  int64_t micro_batches = 1;
  bool fp8 = false;
  bool portable = false;
};

void PrintTo(const Case& c, std::ostream* to) {
  *to << c.name;
}

class CudaAllocationTest : public GpuTest, public testing::WithParamInterface<Case> {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    const Case& c = GetParam();
    if (c.mode != ExpertFfnMode::kLoop && device_info(Device::kCuda).compute_capability != 90) {
      GTEST_SKIP() << "products of all experts at once need compute capability 9.0";
    }
    ModelLimits limits = small_limits();
    limits.device = Device::kCuda;
    limits.expert_ffn_mode = c.mode;
    limits.micro_batches = c.micro_batches;
    limits.portable_kernels = c.portable;
    limits.fp8.enabled = c.fp8;
    limits.fp8.fp8_recipe = Fp8Recipe::kFloat8BlockScaling;
    model_ = std::make_unique<Model>(coded_config(), limits);
    optimizer_ = std::make_unique<Optimizer>(model_->parameters(), AdamwConfig{},
                                             OptimizerOptions{.device = Device::kCuda});
    ModelImage image(*model_, optimizer_.get());
    image.initialize(3);
    image.upload_sync();
    runner_ = std::make_unique<StepRunner>(*model_, *optimizer_, c.record);
    // Of the same sizes, with other tokens and so another routing.
    for (uint64_t step = 0; step < 10; ++step) {
      for (int64_t i = 0; i < c.micro_batches; ++i) {
        batches_.push_back(
            random_batch(coded_config(), {200, 100, 17}, 10 * step + static_cast<uint64_t>(i)));
      }
    }
  }
  void steps(int64_t first, int64_t last) {
    const auto count = static_cast<size_t>(GetParam().micro_batches);
    for (int64_t step = first; step <= last; ++step) {
      const std::span<const Batch> all = batches_;
      runner_->submit(all.subspan(static_cast<size_t>(step - 1) * count, count),
                      {.step = step, .lr = 1e-3, .max_grad_norm = 1.0});
      runner_->finish_sync();
    }
  }

  std::unique_ptr<Model> model_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<StepRunner> runner_;
  std::vector<Batch> batches_;
};

// The first step makes plans, the second records.
TEST_P(CudaAllocationTest, StepsThreeToTenReserveNothing) {
  const Case& c = GetParam();
  steps(1, 2);
  const int64_t reservations = device_reservations();
  const size_t free_bytes = device_info(Device::kCuda).free_bytes;
  AllocationTrace::start();
  steps(3, 10);
  AllocationTrace::stop();
  EXPECT_EQ(device_reservations() - reservations, 0) << "of device or staging memory, by this program";
  EXPECT_EQ(device_info(Device::kCuda).free_bytes, free_bytes) << "by this program or a library";
  ASSERT_TRUE(AllocationTrace::complete()) << AllocationTrace::count() << " allocations on the host";
  const std::vector<std::string> own = AllocationTrace::of_program();
  RecordProperty("host_allocations", std::to_string(AllocationTrace::count()));
  RecordProperty("own_host_allocations", std::to_string(own.size()));
  fmt::print("{}: {} allocations on the host in 8 steps, {} of them by this program\n", c.name,
             AllocationTrace::count(), own.size());
  // cuDNN's front end, which is part of this program, makes lists of the operands at every call that is not
  // recorded.
  if (!c.record && !c.portable) return;
  EXPECT_EQ(own.size(), 0u);
  for (size_t i = 0; i < std::min<size_t>(own.size(), 5); ++i) ADD_FAILURE() << "from" << own[i];
}

INSTANTIATE_TEST_SUITE_P(
    Runs, CudaAllocationTest,
    testing::Values(Case{"fused, recorded"},
                    Case{"fused, recorded, two micro-batches", ExpertFfnMode::kFusedGroupedMlp, true, 2},
                    Case{"grouped, recorded", ExpertFfnMode::kGroupedLinear},
                    Case{"fused in codes, recorded", ExpertFfnMode::kFusedGroupedMlp, true, 1, true},
                    Case{"fused", ExpertFfnMode::kFusedGroupedMlp, false},
                    Case{"loop", ExpertFfnMode::kLoop, false},
                    Case{"loop of portable kernels", ExpertFfnMode::kLoop, false, 1, false, true}));

TEST(CudaAllocation, TheCountsSeeWhatAStepMightReserve) {
  BIOMOE_REQUIRE_GPU();
  AllocationTrace::start();
  const std::vector<int> on_host(1000);
  const std::string text(on_host.size(), 'x');
  AllocationTrace::stop();
  EXPECT_EQ(AllocationTrace::of_program().size(), 2u) << text.size();
  const int64_t before = device_reservations();
  const size_t free_bytes = device_info(Device::kCuda).free_bytes;
  const Arena device(size_t{64} << 20, "test", device_memory(Device::kCuda));
  EXPECT_EQ(device_reservations() - before, 1);
  EXPECT_LT(device_info(Device::kCuda).free_bytes, free_bytes);
  const Arena staging(4096, "test", staging_memory(Device::kCuda));
  EXPECT_EQ(device_reservations() - before, 2);
}

}  // namespace
}  // namespace biomoe::test
