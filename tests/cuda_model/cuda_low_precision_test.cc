// Training in each 8-bit recipe on the GPU, beside the CPU.
#include "biomoe/train/run_config.h"
#include "biomoe/train/selftest.h"
#include "tests/cuda/gpu_test.h"

namespace biomoe::test {
namespace {

TEST(CudaLowPrecisionTest, EveryRecipeLearnsAsOnTheCpu) {
  BIOMOE_REQUIRE_GPU();
  for (const SelftestCase& recipe : selftest_cases()) {
    const double gpu = run_selftest(recipe, Device::kCuda, 1);
    const double cpu = run_selftest(recipe, Device::kCpu, resolved_threads(0));
    EXPECT_NEAR(gpu / cpu, 1.0, selftest_band()) << recipe.name;
    std::printf("%-22s GPU %.5f CPU %.5f\n", std::string(recipe.name).c_str(), gpu, cpu);
  }
}

}  // namespace
}  // namespace biomoe::test
