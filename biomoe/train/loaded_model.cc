#include "biomoe/train/loaded_model.h"

#include <algorithm>

#include "biomoe/checkpoint/hf_import.h"
#include "biomoe/checkpoint/training_checkpoint.h"
#include "biomoe/checkpoint/training_state.h"
#include "biomoe/core/console.h"
#include "biomoe/data/dataset.h"
#include "biomoe/ops/device.h"
#include "biomoe/train/model_image.h"

namespace biomoe {
namespace {

namespace fs = std::filesystem;

void warn(const std::string& line) {
  tell(stderr, "{}\n", one_line(line));
}

bool is_hugging_face(const fs::path& folder) {
  return fs::exists(folder / "config.json") && !is_training_checkpoint(folder);
}

DataConfig data_from_json(const nlohmann::json& json, const std::string& origin) {
  DataConfig data = resolve<DataConfig>(parse_yaml(json.dump(), origin)).value;
  try {
    validate_data_config(data);
  } catch (const Error& error) {
    throw user_error("{}: {}", origin, error.what());
  }
  return data;
}

}  // namespace

DataConfig hugging_face_data(const HfConfig& config, const fs::path& folder, const std::string& tokenizer) {
  const bool ours = !config.dataset.is_null();
  DataConfig data;
  if (ours) {
    data = data_from_json(config.dataset, (folder / "config.json").string() + " (biomoe_dataset)");
  } else {
    data.max_seq_length = std::min(data.max_seq_length, config.model.max_position_embeddings);
    data.token_micro_batch_size = 4 * data.max_seq_length;
  }
  const fs::path file = folder / "tokenizer.json";
  data.tokenizer_name_or_path = !tokenizer.empty() ? tokenizer : fs::exists(file) ? file.string() : "";
  if (!ours && data.tokenizer_name_or_path == file.string() &&
      Vocabulary::from_tokenizer_json(file, false).tells_case())
    data.soft_masked = SoftMaskedPolicy::kKeep;
  return data;
}

nlohmann::json scoring_json(const DataConfig& data) {
  return {{"max_seq_length", data.max_seq_length},
          {"stride", data.stride},
          {"token_micro_batch_size", data.token_micro_batch_size},
          {"add_bos", data.add_bos},
          {"add_eos", data.add_eos},
          {"mask_degenerate_bases", data.mask_degenerate_bases},
          {"soft_masked", kSoftMaskedPolicyNames[static_cast<size_t>(data.soft_masked)]},
          {"soft_masked_weight", data.soft_masked_weight},
          {"n_runs", kNRunPolicyNames[static_cast<size_t>(data.n_runs)]},
          {"n_run_length", data.n_run_length}};
}

OpenedCheckpoint open_checkpoint(const fs::path& path, const std::string& tokenizer) {
  if (!fs::exists(path)) throw user_error("{}: no such checkpoint", path.string());
  if (is_hugging_face(path)) {
    const HfConfig config = read_hf_config(path);
    return {.path = path.string(),
            .hugging_face = true,
            .model = config.model,
            .tokens = config.tokens,
            .data = hugging_face_data(config, path, tokenizer)};
  }
  OpenedCheckpoint opened{.path = find_checkpoint(path, warn).string()};
  const CheckpointHeader header = read_checkpoint_header(opened.path);
  const TrainingState state = TrainingState::from_json(header.state, opened.path);
  const HfConfig config = parse_hf_config(state.model.dump(), opened.path);
  opened.step = header.step;
  opened.model = config.model;
  opened.tokens = config.tokens;
  opened.data = resolve<RunConfig>(parse_yaml(state.config_yaml, opened.path + " (config)")).value.dataset;
  if (!tokenizer.empty()) opened.data.tokenizer_name_or_path = tokenizer;
  return opened;
}

Vocabulary open_vocabulary(const OpenedCheckpoint& checkpoint) {
  const std::string& name = checkpoint.data.tokenizer_name_or_path;
  if (name.empty()) {
    throw user_error(
        "{}: there is no tokenizer.json, and nothing else says what its tokens are; give --tokenizer: "
        "nucleotide, dna, protein or the path of a tokenizer.json",
        checkpoint.path);
  }
  Vocabulary vocabulary = Vocabulary::open(name, checkpoint.data.soft_masked);
  if (vocabulary.size() > checkpoint.model.vocab_size) {
    throw user_error("{}: vocab_size={} is below the {} entries of the vocabulary {}; give --tokenizer",
                     checkpoint.path, checkpoint.model.vocab_size, vocabulary.size(), vocabulary.name());
  }
  return vocabulary;
}

void load_weights(const OpenedCheckpoint& checkpoint, Model& model) {
  ModelImage image(model, nullptr);
  if (checkpoint.hugging_face) {
    import_hf(checkpoint.path, checkpoint.model, model.parameters(), image.weights());
  } else {
    load_checkpoint(checkpoint.path, image.groups());
  }
  image.upload_sync();
}

std::string describe_device(const Model& model) {
  const Device device = model.limits().device;
  if (device == Device::kCpu) return "cpu, fp32";
  return device_info(device).name + ", bf16";
}

LoadedModel load_model(const fs::path& path, const LoadOptions& options) {
  const OpenedCheckpoint opened = open_checkpoint(path, options.tokenizer);
  const ModelConfig& config = opened.model;
  DataConfig data = opened.data;
  data.max_seq_length = options.max_seq_length > 0
                            ? options.max_seq_length
                            : std::min(data.max_seq_length, config.max_position_embeddings);
  data.token_micro_batch_size =
      std::max({data.token_micro_batch_size, data.max_seq_length, options.max_tokens});
  if (data.max_seq_length > config.max_position_embeddings) {
    throw user_error("a window of {} tokens is above the model's max_position_embeddings={}",
                     data.max_seq_length, config.max_position_embeddings);
  }
  if (data.stride >= data.max_seq_length) data.stride = data.max_seq_length / 2;
  Vocabulary vocabulary = open_vocabulary(opened);
  const Device device = resolved_device(options.device);
  auto model = std::make_unique<Model>(
      config,
      ModelLimits{.max_tokens = data.token_micro_batch_size,
                  .max_seqlen = data.max_seq_length,
                  .num_threads = resolved_threads(options.num_threads),
                  .training = false,
                  .expert_ffn_mode = resolved_expert_ffn_mode(ExpertFfnChoice::kAuto, device, config, {}),
                  .device = device});
  load_weights(opened, *model);
  return {std::move(model), std::move(vocabulary), data, opened.path, opened.step};
}

}  // namespace biomoe
