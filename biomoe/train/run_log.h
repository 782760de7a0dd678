// What a run tells while it trains: metrics.jsonl and TensorBoard events in the run folder, and lines and the
// progress on standard output. docs/runs.md lists the fields.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "biomoe/data/batch.h"
#include "biomoe/moe/routing_stats.h"
#include "biomoe/train/evaluation.h"
#include "biomoe/train/metrics.h"
#include "biomoe/train/progress.h"
#include "biomoe/train/tensorboard.h"
#include "biomoe/train/train_step.h"

namespace biomoe {

// One step done.
struct StepRecord {
  int64_t step = 0;    // from 1
  int64_t tokens = 0;  // since the start of training
  double lr = 0;
  double step_seconds = 0;  // train_step alone
  double data_seconds = 0;  // waiting for its micro-batches
  double flops = 0;
};

class RunLog {
 public:
  // For a run that goes on after `last_step`: later lines of metrics.jsonl go. A line of metrics is written
  // every `frequency` steps, for step 1 and for `num_steps`; `peak_flops` a second of the device, if known,
  // is what `mfu` is a share of. Throws as MetricsWriter and EventWriter do.
  RunLog(const std::filesystem::path& run_folder, int64_t last_step, int64_t num_steps, int64_t frequency,
         std::optional<double> peak_flops = std::nullopt);

  void print_line(std::string_view text) { progress_.print_line(text); }

  // Times and rates of a line are means over the steps since the one before; the rest is of its own step.
  // `routing` holds the statistics of this step, `masked` counts since the start of training.
  void step(const StepRecord& record, const StepResult& result, const RoutingStats& routing,
            const MaskCounts& masked);

  // A line of its own, with the step that the model has seen.
  void validation(int64_t step, const Evaluation& evaluation);

  // Ends the progress line.
  void finish(int64_t step) { progress_.finish(step, details_); }

 private:
  struct Interval {
    int64_t steps = 0;
    int64_t tokens = 0;
    double step_seconds = 0;
    double data_seconds = 0;
    double flops = 0;
  };
  void write(const nlohmann::ordered_json& line);

  std::optional<double> peak_flops_;
  int64_t num_steps_;
  int64_t frequency_;
  MetricsWriter metrics_;
  EventWriter events_;
  Progress progress_;
  Interval interval_;  // since the last line of metrics
  std::string details_;
};

// The counts of the loss policies by name, as metrics and checkpoints hold them.
nlohmann::ordered_json mask_counts_json(const MaskCounts& counts);
MaskCounts mask_counts_from(const nlohmann::json& json);  // a name that is missing counts 0

}  // namespace biomoe
