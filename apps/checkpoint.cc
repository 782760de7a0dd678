#include <algorithm>
#include <cmath>
#include <filesystem>

#include "apps/commands.h"
#include "biomoe/checkpoint/checkpoint_summary.h"
#include "biomoe/checkpoint/hf_export.h"
#include "biomoe/checkpoint/hf_import.h"
#include "biomoe/checkpoint/training_state.h"
#include "biomoe/core/console.h"
#include "biomoe/optim/optimizer.h"
#include "biomoe/train/loaded_model.h"
#include "biomoe/train/model_image.h"
#include "biomoe/train/trainer.h"

namespace biomoe::apps {
namespace {

struct Options {
  std::string source, destination, dtype = "float32", max_shard_size = "5GB", tokenizer;
  bool overwrite = false, json = false;
};

DType parse_dtype(const std::string& name) {
  if (name == "float32") return DType::kF32;
  if (name == "bfloat16") return DType::kBF16;
  if (name == "float16") return DType::kF16;
  throw user_error("--dtype {}: choose float32, bfloat16 or float16", name);
}

const ModelLimits kWeightsOnly{.max_tokens = 0, .max_seqlen = 1, .num_threads = 1, .training = false};

HfTokenIds token_ids(const Vocabulary& vocabulary, bool add_bos) {
  const SpecialTokens& special = vocabulary.special();
  HfTokenIds ids{.bos = std::nullopt, .eos = {}, .pad = special.pad};
  if (add_bos) ids.bos = special.bos;
  if (special.eos) ids.eos.push_back(*special.eos);
  return ids;
}

void export_checkpoint(const Options& options) {
  const OpenedCheckpoint opened = open_checkpoint(options.source, options.tokenizer);
  HfExportOptions settings;
  settings.dtype = parse_dtype(options.dtype);
  settings.max_shard_bytes = parse_byte_size(options.max_shard_size);
  settings.overwrite = options.overwrite;
  settings.tokens = opened.tokens;
  if (opened.data.tokenizer_name_or_path.empty()) {
    fmt::print(
        stderr,
        "note: {}: nothing says what its tokens are; exported without tokenizer.json (--tokenizer names "
        "one)\n",
        opened.path);
  } else {
    const Vocabulary vocabulary = open_vocabulary(opened);
    settings.dataset = scoring_json(opened.data);
    if (settings.tokens == HfTokenIds{} || !options.tokenizer.empty())
      settings.tokens = token_ids(vocabulary, opened.data.add_bos);
    settings.extra_files["tokenizer.json"] = vocabulary.tokenizer_json(opened.data.add_bos).dump(1) + "\n";
    settings.extra_files["tokenizer_config.json"] = vocabulary.tokenizer_config_json().dump(1) + "\n";
  }
  Model model(opened.model, kWeightsOnly);
  load_weights(opened, model);
  const HfExportReport report =
      export_hf(options.destination, model.config(), model.parameters(), model.weights_A().f32(), settings);
  fmt::print("wrote {}: {} files, {} tensors, {} bytes ({})\n", options.destination, report.files,
             report.tensors, report.bytes, options.dtype);
}

// A training checkpoint with these weights and fresh moments, to continue from.
void import_checkpoint(const Options& options) {
  const HfConfig source = read_hf_config(options.source);
  for (const auto& line : source.notes) tell(stderr, "note: {}\n", one_line(line));
  Model model(source.model, kWeightsOnly);
  const HfImportReport report =
      import_hf(options.source, source.model, model.parameters(), model.weights_A().f32());
  for (const auto& line : report.notes) tell(stderr, "note: {}\n", one_line(line));
  const float* weights = model.weights_A().f32();
  if (!std::all_of(weights, weights + model.weights_A().num_elements(),
                   [](float value) { return std::isfinite(value); }))
    throw user_error("{}: holds weights that are not finite; biomoe checkpoint verify names them",
                     options.source);
  Optimizer optimizer(model.parameters(), {});
  TrainingState state;
  state.data = {{"sample", 0}, {"micro_batch", 0}};
  state.model = hf_config_json(source.model, source.tokens, DType::kF32);
  RunConfig config;
  config.model = source.model;
  config.dataset = hugging_face_data(source, std::filesystem::absolute(options.source));
  state.config_yaml = to_yaml(config);
  const CheckpointStore store(std::filesystem::path(options.destination) / "checkpoints");
  if (!store.empty())
    throw user_error("{}: holds checkpoints already; choose another folder", options.destination);
  const SaveReport saved = store.save(0, ModelImage(model, &optimizer).groups(), state.to_json());
  fmt::print("imported {} tensors from {} into {}\n", report.tensors, options.source, saved.path.string());
}

}  // namespace

void add_checkpoint(CLI::App& app) {
  CLI::App* command = app.add_subcommand("checkpoint", "convert, describe and check checkpoints");
  command->require_subcommand(1);
  auto options = std::make_shared<Options>();
  CLI::App* import_command =
      command->add_subcommand("import", "a Hugging Face folder into a run folder (step 0)");
  CLI::App* export_command = command->add_subcommand("export", "a checkpoint into a Hugging Face folder");
  for (CLI::App* sub : {import_command, export_command}) {
    sub->add_option("source", options->source, "checkpoint to read")->required();
    sub->add_option("destination", options->destination, "folder to write")->required();
  }
  export_command->add_option("--dtype", options->dtype, "float32, bfloat16 or float16");
  export_command->add_option("--max-shard-size", options->max_shard_size, "largest file, e.g. 5GB");
  export_command->add_option("--tokenizer", options->tokenizer, kTokenizerHelp);
  export_command->add_flag("--overwrite", options->overwrite, "replace an earlier export");
  import_command->callback([options] { import_checkpoint(*options); });
  export_command->callback([options] { export_checkpoint(*options); });
  CLI::App* inspect = command->add_subcommand("inspect", "what a checkpoint holds");
  CLI::App* verify = command->add_subcommand("verify", "structure, sizes and checksums");
  for (CLI::App* sub : {inspect, verify}) {
    sub->add_option("path", options->source, "run, checkpoint or Hugging Face folder")->required();
    sub->add_flag("--json", options->json, "print JSON");
  }
  inspect->callback([options] {
    const nlohmann::json summary = summarise_checkpoint(options->source);
    fmt::print("{}", options->json ? summary.dump(1) + "\n" : summary_text(summary));
  });
  verify->callback([options] {
    std::error_code ignored;
    if (!std::filesystem::exists(options->source, ignored))
      throw user_error("{}: no such checkpoint", options->source);
    const nlohmann::json result = verify_any_checkpoint(options->source);
    fmt::print("{}", options->json ? result.dump(1) + "\n" : verify_text(result));
    if (!result.value("ok", false))
      throw user_error("{}: not a sound checkpoint; take another, or another copy of it", options->source);
  });
}

}  // namespace biomoe::apps
