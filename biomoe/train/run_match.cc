#include "biomoe/train/run_match.h"

#include <algorithm>
#include <array>
#include <optional>
#include <set>
#include <string_view>

#include "biomoe/checkpoint/checksum.h"
#include "biomoe/checkpoint/hf_config.h"
#include "biomoe/core/error.h"
#include "biomoe/core/file.h"

namespace biomoe {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// Sections end with a dot. The model has a comparison of its own.
constexpr std::array<std::string_view, 23> kNotOfTraining{"run_dir",
                                                          "config_name_or_path",
                                                          "init_from",
                                                          "config_kwargs.",
                                                          "expert_ffn_mode",
                                                          "fp8_config.quantized_model_init_kwargs.",
                                                          "fp8_config.fp8_recipe_kwargs.keep_weights",
                                                          "num_train_steps",
                                                          "device",
                                                          "optimizer_store_param_remainders",
                                                          "cuda_graph",
                                                          "deterministic",
                                                          "portable_kernels",
                                                          "num_threads",
                                                          "recompute_layers",
                                                          "poison_activations",
                                                          "sanity_check",
                                                          "parallelism.",
                                                          "dataset.validation_path",
                                                          "dataset.num_workers",
                                                          "checkpoint.",
                                                          "logger.",
                                                          "validation."};

bool is_of_training(std::string_view key) {
  // Not in what a checkpoint says of its model.
  if (key == "config_kwargs.layer_precision" || key == "config_kwargs.router_aux_loss_type") return true;
  return std::none_of(kNotOfTraining.begin(), kNotOfTraining.end(), [&](std::string_view other) {
    return other.ends_with('.') ? key.starts_with(other) : key == other;
  });
}

std::string brief(const std::string& value) {
  constexpr size_t kLongest = 60;
  return value.size() > kLongest ? value.substr(0, kLongest - 3) + "..." : value;
}

// The config.yaml of a run folder, if a run wrote it.
std::optional<RunConfig> config_of_run(const fs::path& run) {
  try {
    const auto written = resolve<RunConfig>(read_yaml_file(run / "config.yaml"));
    const bool every_key =
        std::all_of(written.origins.begin(), written.origins.end(),
                    [](const Origin& origin) { return origin.kind == Origin::Kind::kFile; });
    if (every_key) return written.value;
  } catch (const Error&) {
    // Not there, or not of a run.
  }
  return std::nullopt;
}

// What makes `config` another run than `before`; empty when nothing does.
std::string other_run(const RunConfig& before, const RunConfig& config) {
  if (before.checkpoint.ckpt_dir != config.checkpoint.ckpt_dir) {
    return fmt::format("checkpoint.ckpt_dir='{}' (now '{}')", brief(before.checkpoint.ckpt_dir),
                       brief(config.checkpoint.ckpt_dir));
  }
  if (!model_difference(before.model, config.model).empty()) return "a run of another model";
  return training_differences(before, config);
}

// Of the lines of metrics.jsonl; 0 when none tells a step.
int64_t last_step_of(const fs::path& metrics) {
  const std::string text = read_file(metrics);
  int64_t last = 0;
  for (size_t begin = 0, end = 0; begin < text.size(); begin = end + 1) {
    end = std::min(text.find('\n', begin), text.size());
    const json line = json::parse(text.substr(begin, end - begin), nullptr, false);
    if (line.is_object() && line.contains("step") && line["step"].is_number_unsigned())
      last = std::max(last, line["step"].get<int64_t>());
  }
  return last;
}

// Whether a run had saved a checkpoint, as far as its figures tell.
bool had_checkpoint(const fs::path& run, const RunConfig& config) {
  std::error_code error;
  if (fs::exists(run / "summary.json", error)) {
    const json summary = json::parse(read_file(run / "summary.json"), nullptr, false);
    if (summary.is_object() && summary.contains("checkpoint") && summary["checkpoint"].is_string() &&
        !summary["checkpoint"].get<std::string>().empty())
      return true;
  }
  const int64_t every = config.checkpoint.save_every_n_steps;
  // A save in the background is done before the next one starts.
  return every > 0 && fs::exists(run / "metrics.jsonl", error) &&
         last_step_of(run / "metrics.jsonl") / 2 >= every;
}

RunConfig config_of(const TrainingState& state, const std::string& origin) {
  return resolve<RunConfig>(parse_yaml(state.config_yaml, origin + " (its configuration)")).value;
}

bool holds_something(const fs::path& file) {
  std::error_code error;
  return fs::exists(file, error) && !(fs::is_regular_file(file, error) && fs::file_size(file, error) == 0);
}

}  // namespace

json model_json(const ModelConfig& config) {
  return hf_config_json(config, {.bos = std::nullopt, .eos = {}, .pad = std::nullopt}, DType::kF32);
}

std::string model_difference(const ModelConfig& checkpoint, const ModelConfig& run) {
  return first_difference(model_json(checkpoint), model_json(run));
}

void check_init_from(const RunConfig& config) {
  if (config.init_from.empty()) return;
  const std::string difference = model_difference(read_hf_config(config.init_from).model, config.model);
  if (!difference.empty()) throw user_error("init_from={}: {}", config.init_from, difference);
}

std::string training_differences(const RunConfig& before, const RunConfig& now) {
  RunConfig copies[] = {before, now};  // visit() is for reading and writing
  const FieldList a = FieldList::of(copies[0]), b = FieldList::of(copies[1]);
  std::string text;
  for (size_t i = 0; i < a.fields().size(); ++i) {
    const Field& field = a.fields()[i];
    const std::string old_value = field_value(field), new_value = field_value(b.fields()[i]);
    if (old_value == new_value || !is_of_training(field.key)) continue;
    text += fmt::format("{}{}={} (now {})", text.empty() ? "" : ", ", field.key, brief(old_value),
                        brief(new_value));
  }
  return text;
}

std::string split_id(const DataConfig& config, const Dataset& dataset) {
  if (config.validation_fraction == 0) return "";
  const SequenceStore& store = *dataset.train->store;
  uint32_t crc = 0;
  for (int64_t record = 0; record < store.num_records(); ++record) {
    const std::string line = fmt::format("{} {}\n", store.name(record), store.length(record));
    crc = crc32_update(crc, line.data(), line.size());
  }
  return fmt::format("{} {} {}", crc32_text(crc), dataset.report.train.bases,
                     dataset.report.validation.bases);
}

std::string data_id(const Dataset& dataset) {
  const std::string tokens = dataset.vocabulary.tokenizer_json(false).dump();
  std::string text = fmt::format("vocabulary {}", crc32_text(crc32_update(0, tokens.data(), tokens.size())));
  std::vector<uint8_t> block(size_t{1} << 20);
  std::set<const SequenceStore*> told;  // a split has one store for both parts
  for (const auto& part : {dataset.train, dataset.validation}) {
    if (!part || !told.insert(part->store.get()).second) continue;
    const SequenceStore& store = *part->store;
    uint32_t crc = 0;
    int64_t bases = 0;
    for (int64_t record = 0; record < store.num_records(); ++record) {
      const int64_t length = store.length(record);
      crc = crc32_update(crc, &length, sizeof(length));  // where records end matters too
      for (int64_t begin = 0; begin < length; begin += static_cast<int64_t>(block.size())) {
        const int64_t count = std::min(length - begin, static_cast<int64_t>(block.size()));
        store.read(record, begin, count, block.data());
        crc = crc32_update(crc, block.data(), static_cast<size_t>(count));
      }
      bases += length;
    }
    text += fmt::format(", {} bases in {} records ({})", bases, store.num_records(), crc32_text(crc));
  }
  return text;
}

std::string check_continuation(const TrainingState& state, const std::string& origin, const RunConfig& config,
                               const std::string& split) {
  const RunConfig before = config_of(state, origin);
  const auto saved = state.data.find("split");
  const bool moved = before.dataset.validation_fraction != config.dataset.validation_fraction ||
                     (saved != state.data.end() && *saved != split);
  if (moved) {
    throw user_error(
        "{}: other bases are held out now than were, so that held-out bases were or would be trained on: {}; "
        "use the same data and validation_fraction, or another run_dir",
        origin,
        before.dataset.validation_fraction == config.dataset.validation_fraction
            ? std::string("dataset.path holds other records")
            : fmt::format("dataset.validation_fraction={} (now {})", before.dataset.validation_fraction,
                          config.dataset.validation_fraction));
  }
  std::string differences = training_differences(before, config);
  if (before.num_train_steps != config.num_train_steps && config.schedule.num_decay_steps == 0) {
    differences += fmt::format(
        "{}num_train_steps={} (now {}, over which the learning rate decays anew: lr_scheduler_kwargs."
        "num_decay_steps=0)",
        differences.empty() ? "" : ", ", before.num_train_steps, config.num_train_steps);
  }
  return differences.empty() ? "" : fmt::format("{}: trained with {}", origin, differences);
}

void check_amax_history(const TrainingState& state, const std::string& origin, const RunConfig& config) {
  const int64_t before = config_of(state, origin).fp8_config.fp8_recipe_kwargs.amax_history_len;
  const int64_t now = config.fp8_config.fp8_recipe_kwargs.amax_history_len;
  if (before == now) return;
  throw user_error(
      "{}: its histories of amax are of fp8_config.fp8_recipe_kwargs.amax_history_len={} steps (now {}); set "
      "{}, "
      "or choose another run_dir",
      origin, before, now, before);
}

void check_fresh_start(const RunConfig& config, const fs::path& checkpoints) {
  const fs::path run(config.run_dir);
  const bool figures = holds_something(run / "metrics.jsonl") || holds_something(run / "summary.json");
  if (!figures && !holds_something(run / "config.yaml")) return;
  std::string reason;
  if (const auto before = config_of_run(run); !before) {
    reason = "with no config.yaml that a run wrote";
  } else if (figures) {
    reason = other_run(*before, config);
    if (reason.empty() && had_checkpoint(run, *before))
      reason = "a run whose checkpoints are gone, or could not be saved";
  }
  if (reason.empty()) return;
  throw user_error(
      "run_dir={}: training from step 0 would overwrite what is there ({}), and {} has no checkpoint to "
      "continue "
      "from; choose another run_dir, or move the files away",
      config.run_dir, reason, checkpoints.string());
}

}  // namespace biomoe
