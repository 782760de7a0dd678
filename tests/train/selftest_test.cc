#include "biomoe/train/selftest.h"

#include <gtest/gtest.h>

#include <tuple>

namespace biomoe {
namespace {

// Within the band that `biomoe selftest` allows.
TEST(Selftest, TheCpuGivesTheRecordedLosses) {
  for (const SelftestCase& test : selftest_cases()) {
    const double loss = run_selftest(test, Device::kCpu, 1);
    EXPECT_NEAR(loss / test.loss, 1.0, selftest_band()) << test.name << ": " << loss;
  }
}

TEST(Selftest, IsTheSameForAnyNumberOfThreads) {
  const SelftestCase mxfp8 = selftest_cases().at(1);
  EXPECT_EQ(run_selftest(mxfp8, Device::kCpu, 1), run_selftest(mxfp8, Device::kCpu, 2));
}

// On GPUs that are not here.
TEST(RecipeReport, TellsWhyARecipeIsNotNative) {
  const auto report = [](Fp8Recipe recipe, int capability, bool mx_products) {
    DeviceInfo gpu;
    gpu.compute_capability = capability;
    gpu.mx_products = mx_products;
    return recipe_report(recipe, gpu);
  };
  const RecipeReport hopper = report(Fp8Recipe::kFloat8BlockScaling, 90, false);
  EXPECT_EQ(hopper.support, RecipeSupport::kNative);
  EXPECT_EQ(hopper.reason, "");
  const RecipeReport ampere = report(Fp8Recipe::kFloat8BlockScaling, 80, false);
  EXPECT_EQ(ampere.support, RecipeSupport::kEmulated);
  EXPECT_NE(ampere.reason.find("compute capability 9.0, this GPU has 8.0"), std::string::npos)
      << ampere.reason;
  for (const auto& [capability, built, part] :
       {std::tuple{90, false, "10.0 (built, not yet run), this GPU has 9.0"},
        std::tuple{103, false, "this GPU has 10.3"}, std::tuple{100, false, "BIOMOE_SM100=ON"}}) {
    const RecipeReport mx = report(Fp8Recipe::kMxfp8BlockScaling, capability, built);
    EXPECT_EQ(mx.support, RecipeSupport::kEmulated);
    EXPECT_NE(mx.reason.find(part), std::string::npos) << mx.reason;
  }
  const RecipeReport blackwell = report(Fp8Recipe::kMxfp8BlockScaling, 100, true);
  EXPECT_EQ(blackwell.support, RecipeSupport::kNative);
  EXPECT_EQ(blackwell.reason, "built, not yet run");
  for (const Fp8Recipe recipe : {Fp8Recipe::kFloat8CurrentScaling, Fp8Recipe::kDelayedScaling}) {
    EXPECT_EQ(report(recipe, 90, false).reason, "no native products");
  }
}

}  // namespace
}  // namespace biomoe
