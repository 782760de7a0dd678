#include "biomoe/train/run_log.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <numeric>

namespace biomoe {
namespace {

using Json = nlohmann::ordered_json;

constexpr struct {
  const char* name;
  int64_t MaskCounts::*count;
} kMaskFields[] = {{"bases", &MaskCounts::bases},
                   {"degenerate", &MaskCounts::degenerate_masked},
                   {"soft_masked", &MaskCounts::soft_masked},
                   {"n_run_skipped", &MaskCounts::n_run_skipped},
                   {"reverse_complemented", &MaskCounts::reverse_complemented}};

ProgressOptions progress_options(int64_t last_step, int64_t num_steps) {
  ProgressOptions options;
  options.label = "training";
  options.item = "steps";
  options.total = num_steps;
  options.start = last_step;
  options.show_rate = false;  // the details give tokens a second
  options.out = stdout;
  options.terminal = is_terminal(stdout);
  return options;
}

// Tokens per expert, by layer.
Json expert_load(const RoutingStats& routing) {
  Json load = Json::array();
  const int64_t layers = routing.counts_LE.shape[0], experts = routing.counts_LE.shape[1];
  for (int64_t layer = 0; layer < layers; ++layer) {
    const int64_t* counts = routing.counts_LE.i64() + layer * experts;
    const int64_t sum = std::accumulate(counts, counts + experts, int64_t{0});
    load.push_back({{"max", *std::max_element(counts, counts + experts)},
                    {"mean", static_cast<double>(sum) / static_cast<double>(experts)},
                    {"min", *std::min_element(counts, counts + experts)}});
  }
  return load;
}

}  // namespace

Json mask_counts_json(const MaskCounts& counts) {
  Json json;
  for (const auto& field : kMaskFields) json[field.name] = counts.*field.count;
  return json;
}

MaskCounts mask_counts_from(const nlohmann::json& json) {
  MaskCounts counts;
  for (const auto& field : kMaskFields) counts.*field.count = json.value(field.name, int64_t{0});
  return counts;
}

RunLog::RunLog(const std::filesystem::path& run_folder, int64_t last_step, int64_t num_steps,
               int64_t frequency, std::optional<double> peak_flops)
    : peak_flops_(peak_flops),
      num_steps_(num_steps),
      frequency_(frequency),
      metrics_(run_folder / "metrics.jsonl", last_step),
      events_(run_folder, last_step),
      progress_(progress_options(last_step, num_steps)) {}

void RunLog::write(const Json& line) {
  metrics_.write(line);
  events_.write(line["step"].get<int64_t>(), scalars_of(line));
}

void RunLog::step(const StepRecord& record, const StepResult& result, const RoutingStats& routing,
                  const MaskCounts& masked) {
  ++interval_.steps;
  interval_.tokens += result.tokens;
  interval_.step_seconds += record.step_seconds;
  interval_.data_seconds += record.data_seconds;
  interval_.flops += record.flops;
  const double steps = static_cast<double>(interval_.steps);
  const double seconds = std::max(interval_.step_seconds, 1e-9);
  const double tokens_per_s = static_cast<double>(interval_.tokens) / seconds;
  const std::optional<double> nats =
      result.targets > 0 ? std::optional(result.nats_per_target) : std::nullopt;
  details_ = training_details({.loss = result.loss, .nats_per_base = nats, .tokens_per_s = tokens_per_s});
  progress_.update(record.step, details_);
  if (record.step % frequency_ != 0 && record.step != 1 && record.step != num_steps_) return;
  write({{"step", record.step},
         {"tokens", record.tokens},
         {"loss", result.loss},
         {"lm_loss", result.lm_loss},
         {"nats_per_base", nats ? Json(*nats) : Json()},
         {"lr", record.lr},
         {"grad_norm", result.grad_norm},
         {"tokens_per_s", tokens_per_s},
         {"tflops", interval_.flops / seconds * 1e-12},
         {"mfu", peak_flops_ ? Json(interval_.flops / seconds / *peak_flops_) : Json()},
         {"step_ms", interval_.step_seconds / steps * 1e3},
         {"data_ms", interval_.data_seconds / steps * 1e3},
         {"aux_loss", result.aux_loss},
         {"z_loss", result.z_loss},
         {"targets", result.targets},
         {"expert_load", expert_load(routing)},
         {"masked", mask_counts_json(masked)}});
  interval_ = {};
}

void RunLog::validation(int64_t step, const Evaluation& evaluation) {
  const auto nats = evaluation.nats_per_base();
  write(
      {{"step", step}, {"val_nats_per_base", nats ? Json(*nats) : Json()}, {"val_bases", evaluation.bases}});
}

}  // namespace biomoe
