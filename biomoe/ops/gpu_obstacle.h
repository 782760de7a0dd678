// Why a GPU cannot be used, decided from what the driver and the runtime tell.
#pragma once

#include <string>

namespace biomoe {

inline constexpr int kOldestCapability = 80;  // that biomoe runs on: 10 * major + minor

// "13.2" of CUDA's number 13020.
std::string cuda_version_text(int version);

// Versions are CUDA's numbers.
struct GpuFindings {
  int driver = 0;      // newest CUDA that the driver supports; 0: there is no driver
  int runtime = 0;     // CUDA that this program is built with
  std::string error;   // what the runtime said instead of counting GPUs
  int count = 0;       // visible GPUs
  std::string name;    // of the one that is in use; read where that is below kOldestCapability
  int capability = 0;  // its compute capability
};

// One line without an end: what is missing; and what to do, to which ", or set device=cpu" can be added.
// Empty where the GPU can be used.
std::string gpu_obstacle(const GpuFindings& found);

}  // namespace biomoe
