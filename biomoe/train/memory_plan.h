// RunMemory: what a training run takes from the machine, by category, before it takes it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "biomoe/data/dataset.h"
#include "biomoe/model/model.h"
#include "biomoe/optim/optimizer.h"
#include "biomoe/train/run_config.h"

namespace biomoe {

struct MemoryRow {
  std::string name;
  uint64_t bytes = 0;
  std::string remedy;  // settings that make it smaller, "" for none
};

struct RunMemory {
  std::vector<MemoryRow> rows;        // of the host
  std::vector<MemoryRow> gpu_rows{};  // empty where the run is on the CPU
  uint64_t total() const;
  uint64_t gpu_total() const;
};

// Settings that make a part of the memory smaller, in the words of the command that planned it.
struct MemoryRemedies {
  std::string sizes;  // where they are beyond counting
  std::string model, states, masters, activations, scratch, batches, threads;
};

// Most resident bytes that training with `config` (vocab_size resolved) has at any time. Each row comes from
// the code that lays that part out. Of a run of many ranks, it is one rank's. `dataset` is what the run
// trains on; without one (the files are elsewhere) the sequences count as nothing and validation as present
// when it is configured. Sequences spilled to a file are not counted: the system drops their pages when it
// needs room.
RunMemory plan_run_memory(const RunConfig& config, const Dataset* dataset);

// The same for training steps alone, of one rank of limits.place, on batches of limits.max_tokens: without a
// data set, checkpoints, or a copy of the model on the host.
RunMemory plan_step_memory(const ModelConfig& model, const ModelLimits& limits,
                           const OptimizerOptions& optimizer, const MemoryRemedies& remedies);

// The device that a plan is for: the one asked for, here or not; auto: the one a run would take here.
Device planned_device(DeviceChoice choice);

// Whether `rows` fit `bytes`, in a line: "fits: 12.3 GB are left" or "does not fit: 12.3 GB too many, most
// are gradients (14.5 GB): choose ...".
struct FitLine {
  bool fits = false;
  std::string text;
};
FitLine fit_line(const std::vector<MemoryRow>& rows, uint64_t bytes);

// Throws user_error, with the bytes by category and what to change, when `memory` exceeds `available` bytes.
// `held` of the planned bytes are resident in this process already, so `available` does not hold them.
void require_memory(const RunMemory& memory, uint64_t held, uint64_t available);

// As above, for what starts now on this machine, as one of `ranks_on_host` alike, and for its GPU.
void require_memory_here(const RunMemory& memory, int64_t ranks_on_host);

}  // namespace biomoe
