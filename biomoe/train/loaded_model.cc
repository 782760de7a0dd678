#include "biomoe/train/loaded_model.h"

#include <algorithm>

#include "biomoe/checkpoint/hf_config.h"
#include "biomoe/checkpoint/hf_import.h"
#include "biomoe/checkpoint/training_checkpoint.h"
#include "biomoe/checkpoint/training_state.h"
#include "biomoe/core/console.h"
#include "biomoe/ops/device.h"
#include "biomoe/train/model_image.h"
#include "biomoe/train/run_config.h"
#include "biomoe/train/trainer.h"

namespace biomoe {
namespace {

namespace fs = std::filesystem;

void warn(const std::string& line) {
  tell(stderr, "{}\n", line);
}

bool is_hugging_face(const fs::path& folder) {
  return fs::exists(folder / "config.json") && !is_training_checkpoint(folder);
}

}  // namespace

std::string describe_device(const Model& model) {
  const Device device = model.limits().device;
  if (device == Device::kCpu) return "cpu, fp32";
  return device_info(device).name + ", bf16";
}

LoadedModel load_model(const fs::path& path, const LoadOptions& options) {
  if (!fs::exists(path)) throw user_error("{}: no such checkpoint", path.string());
  ModelConfig config;
  DataConfig data;
  CheckpointHeader header;
  fs::path folder = path;
  const bool hugging_face = is_hugging_face(path);
  if (hugging_face) {
    config = read_hf_config(path).model;
    data.max_seq_length = std::min<int64_t>(1024, config.max_position_embeddings);
    data.token_micro_batch_size = 4 * data.max_seq_length;
    if (fs::exists(path / "tokenizer.json")) data.tokenizer_name_or_path = (path / "tokenizer.json").string();
  } else {
    folder = find_checkpoint(path, warn);
    header = read_checkpoint_header(folder);
    const TrainingState state = TrainingState::from_json(header.state, folder.string());
    config = parse_hf_config(state.model.dump(), folder.string()).model;
    RunConfig run = resolve<RunConfig>(parse_yaml(state.config_yaml, folder.string() + " (config)")).value;
    data = run.dataset;
  }
  if (options.max_seq_length > 0) data.max_seq_length = options.max_seq_length;
  data.token_micro_batch_size =
      std::max({data.token_micro_batch_size, data.max_seq_length, options.max_tokens});
  if (data.max_seq_length > config.max_position_embeddings) {
    throw user_error("a window of {} tokens is above the model's max_position_embeddings={}",
                     data.max_seq_length, config.max_position_embeddings);
  }
  if (data.stride >= data.max_seq_length) data.stride = data.max_seq_length / 2;
  Vocabulary vocabulary = Vocabulary::open(data.tokenizer_name_or_path, data.soft_masked);
  if (vocabulary.size() > config.vocab_size) {
    throw user_error("{}: vocab_size={} is below the {} entries of the vocabulary {}", folder.string(),
                     config.vocab_size, vocabulary.size(), vocabulary.name());
  }
  const Device device = resolved_device(options.device);
  auto model = std::make_unique<Model>(
      config, ModelLimits{.max_tokens = data.token_micro_batch_size,
                          .max_seqlen = data.max_seq_length,
                          .num_threads = resolved_threads(options.num_threads),
                          .training = false,
                          .expert_ffn_mode = resolved_expert_ffn_mode(ExpertFfnChoice::kAuto, device, config),
                          .device = device});
  ModelImage image(*model, nullptr);
  if (hugging_face) {
    import_hf(folder, config, model->parameters(), image.weights());
  } else {
    load_checkpoint(folder, image.groups());
  }
  image.upload_sync();
  return {std::move(model), std::move(vocabulary), data, folder.string(), hugging_face ? -1 : header.step};
}

}  // namespace biomoe
