// Why a GPU cannot be used, decided from what the driver and the runtime tell.
#pragma once

#include <string>

namespace biomoe {

// Versions are CUDA's numbers: 13020 is 13.2.
struct GpuFindings {
  int driver = 0;      // newest CUDA that the driver supports; 0: there is no driver
  int runtime = 0;     // CUDA that this program is built with
  std::string error;   // what the runtime said instead of counting GPUs
  int count = 0;       // visible GPUs
  std::string name;    // of the one that is in use
  int capability = 0;  // its compute capability: 10 * major + minor
};

// One line without an end: what is missing; and what to do, to which ", or set device=cpu" can be added.
// Empty where the GPU can be used.
std::string gpu_obstacle(const GpuFindings& found);

}  // namespace biomoe
