#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>

#include "apps/checked_options.h"
#include "apps/commands.h"
#include "biomoe/config/fields.h"
#include "biomoe/core/console.h"
#include "biomoe/core/descriptor.h"
#include "biomoe/core/file.h"
#include "biomoe/data/dataset.h"
#include "biomoe/data/markov.h"
#include "biomoe/train/evaluation.h"
#include "biomoe/train/loaded_model.h"

namespace biomoe::apps {
namespace {

struct EvalOptions {
  std::string checkpoint, json, tokenizer;
  std::vector<std::string> data;
  std::vector<int> markov;
  double holdout_fraction = 0.0;
  std::string device{kDeviceChoiceNames[0]};
  std::optional<std::string> text_column;
  int64_t num_threads = 0, max_seq_length = 0, stride = -1;
};

std::string figure(const nlohmann::json& value) {
  return value.is_null() ? "-" : fmt::format("{:.4f}", value.get<double>());
}

void print_row(const std::string& name, const nlohmann::json& score) {
  fmt::print("{:<28} {:>12} {:>11} {:>11} {:>11}{}\n", name, score["bases"].get<int64_t>(),
             figure(score["nats_per_base"]), figure(score["bits_per_base"]), figure(score["perplexity"]),
             score["bases"] == 0 ? "  nothing was scored" : "");
}

// The files that the model and the sequences come from.
std::vector<std::string> inputs_of(const LoadedModel& loaded, const DataReport& data) {
  std::vector<std::string> inputs;
  for (const std::string& name : folder_names(loaded.path))
    inputs.push_back((std::filesystem::path(loaded.path) / name).string());
  for (const FileReport& file : data.files) inputs.push_back(file.path);
  return inputs;
}

// A score of bases that the run was trained on says nothing about others.
void tell_what_was_trained_on(const DataConfig& of_run, const EvalOptions& options) {
  const double scored = options.holdout_fraction > 0 ? options.holdout_fraction : 1.0;
  if (scored <= of_run.validation_fraction) return;
  for (const std::string& path : options.data) {
    const auto same = [&path](const std::string& trained) {
      std::error_code unknown;  // of files that are gone: then it is not known
      return std::filesystem::equivalent(path, trained, unknown);
    };
    if (std::none_of(of_run.path.begin(), of_run.path.end(), same)) continue;
    tell(stderr, "note: the run was trained on {}, {}: part of what is scored here was seen in training\n",
         path,
         of_run.validation_fraction > 0
             ? fmt::format("but for the last {:g} of the bases", of_run.validation_fraction)
             : "all of it");
    return;
  }
}

void run(const EvalOptions& options) {
  if (!options.json.empty()) require_creatable(options.json);
  LoadedModel loaded = load_model(
      options.checkpoint, {.device = choice_of<DeviceChoice>("--device", options.device, kDeviceChoiceNames),
                           .num_threads = options.num_threads,
                           .max_seq_length = options.max_seq_length,
                           .tokenizer = options.tokenizer});
  DataConfig data = loaded.data;
  data.path = options.data;
  data.validation_path.clear();
  data.validation_fraction = options.holdout_fraction;
  if (options.stride >= 0) data.stride = options.stride;
  if (options.text_column) data.text_column = *options.text_column;
  std::shared_ptr<const SequencePart> part, fitted;
  DataReport found;
  if (options.holdout_fraction > 0) {
    const Dataset dataset = open_dataset(data);
    part = dataset.validation;
    fitted = dataset.train;
    found = dataset.report;
  } else {
    if (!options.markov.empty()) {
      throw user_error(
          "--markov needs --holdout-fraction: the models are fitted on the part that is not held out");
    }
    part = open_sequences(options.data, data, loaded.vocabulary, &found);
  }
  if (!options.markov.empty() && loaded.vocabulary.alphabet() != Alphabet::kNucleotide) {
    throw user_error("--markov: the models are of A, C, G and T, and this checkpoint reads {}; leave it out",
                     loaded.vocabulary.name());
  }
  if (found.unknown > 0) {
    tell(stderr, "note: {} of {} symbols of the data have no token in the vocabulary {}: none is scored\n",
         found.unknown, found.bases, loaded.vocabulary.name());
  }
  if (!options.json.empty()) require_not_an_input(options.json, inputs_of(loaded, found));
  tell_what_was_trained_on(loaded.data, options);
  const Evaluation evaluation =
      evaluate(*loaded.model, part, loaded.vocabulary, validation_loader_options(data));
  nlohmann::json report = {{"checkpoint", loaded.path},
                           {"device", describe_device(*loaded.model)},
                           {"holdout_fraction", options.holdout_fraction},
                           {"total", score_json(evaluation.bases, evaluation.nats)},
                           {"records", nlohmann::json::array()},
                           {"markov", nlohmann::json::array()}};
  fmt::print("on {}\n", describe_device(*loaded.model));
  fmt::print("{:<28} {:>12} {:>11} {:>11} {:>11}\n", "", "bases", "nats/base", "bits/base", "perplexity");
  for (const RecordScore& record : evaluation.records) {
    nlohmann::json score = score_json(record.bases, record.nats);
    score["name"] = part->store->name(record.record);
    if (report["records"].size() < 50) print_row("record " + part->store->name(record.record), score);
    report["records"].push_back(score);
  }
  if (evaluation.records.size() > 50) fmt::print("... and {} more records\n", evaluation.records.size() - 50);
  print_row("model", report["total"]);
  for (int order : options.markov) {
    MarkovModel markov(order);
    markov.fit(*fitted->store, fitted->windows.segments());
    const MarkovScore score = markov.score(*part->store, part->windows.segments());
    nlohmann::json row = score_json(score.scored, score.nats);
    row["order"] = order;
    print_row(fmt::format("Markov, order {}", order), row);
    report["markov"].push_back(row);
  }
  if (!options.json.empty()) write_output(options.json, report.dump(2) + "\n");
}

}  // namespace

void add_eval(CLI::App& app) {
  CLI::App* command =
      app.add_subcommand("eval", "nats/base of a model on sequences, per record and in total");
  auto options = std::make_shared<EvalOptions>();
  command->add_option("--checkpoint", options->checkpoint, "run, checkpoint or Hugging Face folder")
      ->required();
  command->add_option("--data", options->data, "sequence files")->required();
  add_number(*command, "--holdout-fraction", options->holdout_fraction,
             "score only this last part of the bases", {0.0, 0.999});
  command->add_option("--text-column", options->text_column,
                      "JSONL: the field that holds the sequence; default: that of the run");
  command
      ->add_option("--markov", options->markov,
                   "orders of Markov models fitted on the other part, e.g. 0,2,5,8")
      ->delimiter(',')
      ->check(CLI::Range(0, MarkovModel::kMaxOrder));
  command->add_option("--json", options->json, "write the figures to this file");
  add_integer(*command, "--max-seq-length", options->max_seq_length, "window; default: that of the run", {1});
  add_integer(*command, "--stride", options->stride,
              "tokens of context that windows share; default: that of the run");
  command->add_option("--tokenizer", options->tokenizer, kTokenizerHelp);
  command->add_option("--device", options->device, "auto, cpu or cuda");
  add_integer(*command, "--threads", options->num_threads, "CPU threads; 0: all");
  command->callback([options] { run(*options); });
}

}  // namespace biomoe::apps
