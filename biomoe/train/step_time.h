// How long a training step takes at least, before it is run.
#pragma once

#include <string>

#include "biomoe/train/run_config.h"

namespace biomoe {

struct StepTime {
  double flops = 0;             // of a step of full micro-batches, as step_flops counts them
  double flops_per_second = 0;  // CPU: of a matrix product of the shape that most of them have, on this
                                // machine; GPU: of all of a step's products
  double update_seconds = 0;    // GPU: AdamW's bytes, and those of weights' codes, at the memory's rate; on
                                // the CPU it is not counted
  double quantize_seconds = 0;  // GPU: weights read and written again by a recipe that is emulated
  double communication_seconds = 0;  // between GPUs; between CPUs it is not counted
  int num_threads = 1;
  std::string basis;  // where the rate comes from
  double seconds() const {
    return flops / flops_per_second + update_seconds + quantize_seconds + communication_seconds;
  }
};

// Rates between GPUs in bytes a second and direction: NVLink 4 within a host of so many, and a 400 Gbit/s
// network port a GPU between hosts.
struct LinkRates {
  int64_t gpus_of_host = 8;
  double rows = 240e9;        // rows to and from experts, on one host
  double collective = 200e9;  // reduce-scatter and all-gather on one host, of the larger side
  double between_hosts = 45e9;
};

// Of one step on GPUs whose experts and data are split as `mesh` says.
double communication_seconds(const RunConfig& config, const MeshSize& mesh, const LinkRates& rates = {});

// On the CPU measures the product of an expert's first layer with an even share of the rows for about
// `measure_seconds`; for a GPU, which need not be here, takes what an H200 reaches (bench/NOTES.md).
// A step does more than products, so it takes longer than seconds(). `config` has its vocab_size resolved.
StepTime estimate_step_time(const RunConfig& config, double measure_seconds = 0.2);
// The same on a GPU, with the data split over so many groups of ep_size ranks.
StepTime estimate_gpu_step_time(const RunConfig& config, int64_t dp_size);

}  // namespace biomoe
