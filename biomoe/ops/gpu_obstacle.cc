#include "biomoe/ops/gpu_obstacle.h"

#include <fmt/format.h>

namespace biomoe {

std::string cuda_version_text(int version) {
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

std::string gpu_obstacle(const GpuFindings& found) {
  if (found.driver == 0) return "no NVIDIA driver is installed; install one";
  if (!found.error.empty() && found.driver < found.runtime) {
    return fmt::format(
        "the NVIDIA driver supports CUDA up to {}, and this biomoe needs {}; update the driver",
        cuda_version_text(found.driver), cuda_version_text(found.runtime));
  }
  if (!found.error.empty()) {
    return fmt::format("the GPU cannot be used: {}; check it with nvidia-smi", found.error);
  }
  if (found.count == 0) return "no NVIDIA GPU is visible; check nvidia-smi and CUDA_VISIBLE_DEVICES";
  if (found.capability >= kOldestCapability) return "";
  return fmt::format(
      "{} has compute capability {}.{}, and biomoe needs {}.{} or later; choose another GPU by "
      "CUDA_VISIBLE_DEVICES",
      found.name, found.capability / 10, found.capability % 10, kOldestCapability / 10,
      kOldestCapability % 10);
}

}  // namespace biomoe
