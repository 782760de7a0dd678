#include "biomoe/train/selftest.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace biomoe
