#include "biomoe/ops/gpu_obstacle.h"

#include <gtest/gtest.h>

namespace biomoe {
namespace {

const GpuFindings kHopper{
    .driver = 13000, .runtime = 13000, .error = "", .count = 1, .name = "NVIDIA H200", .capability = 90};

GpuFindings with(void (*change)(GpuFindings&)) {
  GpuFindings found = kHopper;
  change(found);
  return found;
}

TEST(GpuObstacle, IsNoneWhereTheGpuCanBeUsed) {
  EXPECT_EQ(gpu_obstacle(kHopper), "");
  EXPECT_EQ(gpu_obstacle(with([](GpuFindings& found) { found.capability = 80; })), "");
  // Within a major version the runtime takes older drivers, and says so by counting.
  EXPECT_EQ(gpu_obstacle(with([](GpuFindings& found) { found.runtime = 13020; })), "");
}

TEST(GpuObstacle, SaysWhatIsMissingAndWhatToDo) {
  const std::pair<void (*)(GpuFindings&), const char*> rows[] = {
      {[](GpuFindings& found) {
         found.driver = 0;
         found.error = "CUDA driver version is insufficient for CUDA runtime version";
         found.count = 0;
       },
       "no NVIDIA driver is installed; install one"},
      {[](GpuFindings& found) {
         found.driver = 12040;
         found.error = "CUDA driver version is insufficient for CUDA runtime version";
         found.count = 0;
       },
       "the NVIDIA driver supports CUDA up to 12.4, and this biomoe needs 13.0; update the driver"},
      {[](GpuFindings& found) { found.error = "out of memory"; },
       "the GPU cannot be used: out of memory; check it with nvidia-smi"},
      {[](GpuFindings& found) { found.count = 0; },
       "no NVIDIA GPU is visible; check nvidia-smi and CUDA_VISIBLE_DEVICES"},
      {[](GpuFindings& found) {
         found.name = "Tesla T4";
         found.capability = 75;
       },
       "Tesla T4 has compute capability 7.5, and biomoe needs 8.0 or later; choose another GPU by "
       "CUDA_VISIBLE_DEVICES"}};
  for (const auto& [change, line] : rows) EXPECT_EQ(gpu_obstacle(with(change)), line);
}

}  // namespace
}  // namespace biomoe
