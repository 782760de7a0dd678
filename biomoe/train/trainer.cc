#include "biomoe/train/trainer.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>

#include "biomoe/checkpoint/hf_config.h"
#include "biomoe/checkpoint/hf_import.h"
#include "biomoe/core/file.h"
#include "biomoe/core/version.h"

namespace biomoe {
namespace {

namespace fs = std::filesystem;

void note(const std::string& line) {
  fmt::print(stderr, "{}\n", line);
}

nlohmann::json model_json(const ModelConfig& config) {
  return hf_config_json(config, {.bos = std::nullopt, .eos = {}, .pad = std::nullopt}, DType::kF32);
}

// metrics.jsonl holds steps up to the one a run resumes from; later lines and a torn last one go.
void trim_metrics(const fs::path& path, int64_t last_step) {
  std::error_code error;
  if (!fs::exists(path, error)) return;
  const std::string text = read_file(path);
  std::string kept;
  size_t begin = 0;
  for (size_t end = text.find('\n'); end != std::string::npos;
       begin = end + 1, end = text.find('\n', begin)) {
    const std::string line = text.substr(begin, end - begin);
    const nlohmann::json json = nlohmann::json::parse(line, nullptr, false);
    if (json.is_object() && json.value("step", int64_t{0}) <= last_step) kept += line + "\n";
  }
  if (kept.size() != text.size()) replace_file(path, kept);
}

}  // namespace

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::vector<TensorGroup> checkpoint_groups(const Model& model, const Optimizer* optimizer) {
  auto group = [&](const char* name, TensorView arena) {
    TensorGroup result{name, {}};
    for (const auto& spec : model.parameters().specs()) {
      result.tensors.push_back({spec.name, model.parameters().view(arena, spec)});
    }
    return result;
  };
  std::vector<TensorGroup> groups{group("model", model.weights_A())};
  if (optimizer) {
    groups.push_back(group("exp_avg", optimizer->exp_avg_A()));
    groups.push_back(group("exp_avg_sq", optimizer->exp_avg_sq_A()));
  }
  return groups;
}

ModelLimits model_limits(const RunConfig& config, bool training) {
  return {.max_tokens = config.dataset.token_micro_batch_size,
          .max_seqlen = config.dataset.max_seq_length,
          .num_threads = resolved_threads(config.num_threads),
          .training = training,
          .recompute_layers = config.recompute_layers,
          .expert_ffn_mode = config.expert_ffn_mode,
          .micro_batches = config.grad_acc_steps};
}

Trainer::Trainer(ResolvedConfig<RunConfig> config, double started_seconds)
    : resolved_(std::move(config)),
      config_(resolved_.value),
      dataset_(open_dataset(config_.dataset)),
      started_seconds_(started_seconds) {
  ModelConfig& model = resolved_.value.model;
  if (model.vocab_size == 0) model.vocab_size = dataset_.vocabulary.size();
  if (model.vocab_size < dataset_.vocabulary.size()) {
    throw user_error("config_kwargs.vocab_size={} is below the {} entries of the vocabulary {}",
                     model.vocab_size, dataset_.vocabulary.size(), dataset_.vocabulary.name());
  }
  model.validate();
  if (config_.dataset.max_seq_length > model.max_position_embeddings) {
    throw user_error("dataset.max_seq_length={} is above config_kwargs.max_position_embeddings={}",
                     config_.dataset.max_seq_length, model.max_position_embeddings);
  }
  model_ = std::make_unique<Model>(model, model_limits(config_, true));
  optimizer_ = std::make_unique<Optimizer>(model_->parameters(), config_.adamw);
  loader_ =
      std::make_unique<Loader>(dataset_.train, dataset_.vocabulary, train_loader_options(config_.dataset));
  micro_batches_.resize(static_cast<size_t>(config_.grad_acc_steps));
  for (Batch& batch : micro_batches_) batch.reserve(config_.dataset.token_micro_batch_size);
  const fs::path folder = config_.checkpoint.ckpt_dir.empty() ? fs::path(config_.run_dir) / "checkpoints"
                                                              : fs::path(config_.checkpoint.ckpt_dir);
  store_ = std::make_unique<CheckpointStore>(
      folder, CheckpointOptions{.max_checkpoints = config_.checkpoint.max_checkpoints, .warn = note});
  if (config_.init_from.empty()) {
    model_->initialize(static_cast<uint64_t>(config_.seed));
  } else {
    const HfConfig source = read_hf_config(config_.init_from);
    const std::string difference = first_difference(model_json(source.model), model_json(model));
    if (!difference.empty()) throw user_error("init_from={}: {}", config_.init_from, difference);
    import_hf(config_.init_from, model, model_->parameters(), model_->weights_A().f32());
  }
  resume();
}

void Trainer::resume() {
  const auto latest = store_->latest_good();
  if (!latest) return;
  if (!config_.checkpoint.resume_from_checkpoint) {
    throw user_error(
        "{} holds checkpoints already; choose another run_dir, or checkpoint.resume_from_checkpoint=true",
        store_->folder().string());
  }
  const CheckpointHeader header = read_checkpoint_header(latest->path);
  const TrainingState state = TrainingState::from_json(header.state, latest->path.string());
  const std::string difference = first_difference(state.model, model_json(config_.model));
  if (!difference.empty()) {
    throw user_error("{}: {}; use the same model configuration, or another run_dir", latest->path.string(),
                     difference);
  }
  load_checkpoint(latest->path, checkpoint_groups(*model_, optimizer_.get()));
  step_ = state.step;
  saved_step_ = state.step;
  optimizer_->set_steps(state.optimizer_step);
  loader_->seek({state.data.value("sample", int64_t{0}), state.data.value("micro_batch", int64_t{0})});
  tokens_seen_ = state.extra.value("tokens", int64_t{0});
  note(fmt::format("resuming from {} at step {}", latest->path.string(), step_));
}

nlohmann::json Trainer::state() const {
  TrainingState state;
  state.step = step_;
  state.optimizer_step = optimizer_->steps();
  state.seed = static_cast<uint64_t>(config_.seed);
  state.data = {{"sample", loader_->position().sample}, {"micro_batch", loader_->position().micro_batch}};
  state.model = model_json(config_.model);
  state.config_yaml = to_yaml(config_);
  state.extra = {{"tokens", tokens_seen_}};
  return state.to_json();
}

void Trainer::load_batches() {
  const double begin = now_seconds();
  for (Batch& batch : micro_batches_) loader_->next(batch);
  clock_.data_seconds += now_seconds() - begin;
}

void Trainer::save() {
  if (saved_step_ == step_) return;
  if (saver_) {
    saver_->save(step_, state());
  } else {
    store_->save(step_, checkpoint_groups(*model_, optimizer_.get()), state());
  }
  saved_step_ = step_;
}

Evaluation Trainer::validate(int64_t max_batches) {
  return evaluate(*model_, dataset_.validation, dataset_.vocabulary,
                  validation_loader_options(config_.dataset), {.max_batches = max_batches, .progress = {}});
}

void Trainer::log_step(const StepResult& result, double lr) {
  const RoutingStats routing = model_->routing();
  nlohmann::json load = nlohmann::json::array();
  const int64_t experts = config_.model.num_local_experts;
  for (int64_t layer = 0; layer < config_.model.num_hidden_layers; ++layer) {
    const int64_t* counts = routing.counts_LE.i64() + layer * experts;
    const double mean = static_cast<double>(result.tokens * config_.model.num_experts_per_tok) /
                        static_cast<double>(std::max<int64_t>(1, experts));
    load.push_back({{"max", *std::max_element(counts, counts + experts)},
                    {"mean", mean},
                    {"min", *std::min_element(counts, counts + experts)}});
  }
  const double steps = static_cast<double>(std::max<int64_t>(1, clock_.steps));
  const double tokens_per_s = static_cast<double>(clock_.tokens) / std::max(1e-9, clock_.step_seconds);
  const MaskCounts& masked = loader_->counts();
  const nlohmann::json line = {{"step", step_},
                               {"tokens", tokens_seen_},
                               {"loss", result.loss},
                               {"lm_loss", result.lm_loss},
                               {"nats_per_base", result.nats_per_target},
                               {"lr", lr},
                               {"grad_norm", result.grad_norm},
                               {"tokens_per_s", tokens_per_s},
                               {"tflops", clock_.flops / std::max(1e-9, clock_.step_seconds) * 1e-12},
                               {"mfu", nullptr},
                               {"step_ms", clock_.step_seconds / steps * 1e3},
                               {"data_ms", clock_.data_seconds / steps * 1e3},
                               {"aux_loss", result.aux_loss},
                               {"z_loss", result.z_loss},
                               {"targets", result.targets},
                               {"expert_load", load},
                               {"masked",
                                {{"degenerate", masked.degenerate_masked},
                                 {"soft_masked", masked.soft_masked},
                                 {"n_run_skipped", masked.n_run_skipped},
                                 {"reverse_complemented", masked.reverse_complemented}}}};
  const std::string text = line.dump() + "\n";
  if (std::fwrite(text.data(), 1, text.size(), metrics_) != text.size() || std::fflush(metrics_) != 0) {
    throw failure("{}/metrics.jsonl: cannot write", config_.run_dir);
  }
  const double left = static_cast<double>(config_.num_train_steps - step_) * clock_.step_seconds / steps;
  const bool terminal = isatty(fileno(stdout));
  fmt::print("{}step {}/{}  loss {:.4f}  nats/base {:.4f}  lr {:.2e}  {:.0f} tokens/s  ETA {:.0f} s {}",
             terminal ? "\r" : "", step_, config_.num_train_steps, result.loss, result.nats_per_target, lr,
             tokens_per_s, left, terminal ? "  " : "\n");
  std::fflush(stdout);
  clock_ = {};
}

TrainSummary Trainer::run() {
  const fs::path folder(config_.run_dir);
  std::error_code error;
  fs::create_directories(folder, error);
  if (error) throw user_error("run_dir={}: cannot create the folder: {}", config_.run_dir, error.message());
  replace_file(folder / "config.yaml", to_yaml(resolved_));
  trim_metrics(folder / "metrics.jsonl", step_);
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> metrics(
      std::fopen((folder / "metrics.jsonl").c_str(), "a"), std::fclose);
  if (!metrics) throw user_error("run_dir={}: cannot open metrics.jsonl for writing", config_.run_dir);
  metrics_ = metrics.get();
  fmt::print("{}", dataset_.report.text());
  fmt::print("{} parameters, {} active a token; {} threads\n", model_->parameters().num_parameters(),
             model_->parameters().num_active_parameters(), model_->limits().num_threads);
  if (config_.checkpoint.async_save && config_.checkpoint.save_every_n_steps > 0) {
    saver_ = std::make_unique<AsyncSaver>(*store_, checkpoint_groups(*model_, optimizer_.get()));
  }
  const double begin = now_seconds();
  TrainSummary summary;
  if (step_ >= config_.num_train_steps) fmt::print("training is complete at step {}\n", step_);
  while (step_ < config_.num_train_steps) {
    load_batches();
    const double step_begin = now_seconds();
    const double lr = scheduled_lr(config_.schedule, config_.adamw.lr, config_.num_train_steps, step_);
    const StepResult result = train_step(*model_, *optimizer_, micro_batches_,
                                         {.step = step_ + 1,
                                          .lr = lr,
                                          .max_grad_norm = config_.max_grad_norm,
                                          .poison_activations = config_.poison_activations});
    if (first_step_seconds_ == 0) first_step_seconds_ = step_begin - started_seconds_;
    clock_.step_seconds += now_seconds() - step_begin;
    ++clock_.steps;
    ++step_;
    tokens_seen_ += result.tokens;
    clock_.tokens += result.tokens;
    for (const Batch& batch : micro_batches_)
      clock_.flops += step_flops(config_.model, model_->parameters(), batch);
    summary.final_loss = result.loss;
    if (step_ % config_.logger.frequency == 0 || step_ == config_.num_train_steps || step_ == 1)
      log_step(result, lr);
    const bool last = step_ == config_.num_train_steps;
    if (config_.validation.every_n_steps > 0 && step_ % config_.validation.every_n_steps == 0 && !last &&
        dataset_.validation) {
      fmt::print("\nstep {}  validation {:.4f} nats/base\n", step_,
                 validate(config_.validation.max_batches).nats_per_base());
    }
    if (config_.checkpoint.save_every_n_steps > 0 && step_ % config_.checkpoint.save_every_n_steps == 0)
      save();
  }
  fmt::print("\n");
  if (config_.checkpoint.save_final_model) save();
  if (saver_) saver_->wait();
  if (const auto latest = store_->latest()) summary.checkpoint = latest->path.string();
  if (dataset_.validation) summary.validation = validate(0);
  summary.steps = step_;
  write_summary(summary, now_seconds() - begin);
  metrics_ = nullptr;
  return summary;
}

void Trainer::write_summary(const TrainSummary& summary, double seconds) const {
  nlohmann::json json = {{"version", kVersion},
                         {"steps", summary.steps},
                         {"tokens", tokens_seen_},
                         {"parameters", model_->parameters().num_parameters()},
                         {"active_parameters", model_->parameters().num_active_parameters()},
                         {"final_loss", summary.final_loss},
                         {"seconds", seconds},
                         {"first_step_after_seconds", first_step_seconds_},
                         {"checkpoint", summary.checkpoint},
                         {"data", dataset_.report.json()}};
  if (summary.validation) {
    json["validation"] = {{"bases", summary.validation->bases},
                          {"nats_per_base", summary.validation->nats_per_base()},
                          {"bits_per_base", summary.validation->bits_per_base()}};
  }
  replace_file(fs::path(config_.run_dir) / "summary.json", json.dump(2) + "\n");
}

}  // namespace biomoe
