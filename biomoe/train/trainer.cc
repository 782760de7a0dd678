#include "biomoe/train/trainer.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <type_traits>

#include "biomoe/checkpoint/checkpoint_manifest.h"
#include "biomoe/checkpoint/hf_config.h"
#include "biomoe/checkpoint/hf_import.h"
#include "biomoe/checkpoint/ranked_save.h"
#include "biomoe/core/clock.h"
#include "biomoe/core/console.h"
#include "biomoe/core/file.h"
#include "biomoe/core/version.h"
#include "biomoe/dist/gpus.h"
#include "biomoe/dist/work_together.h"
#include "biomoe/ops/device_peak.h"
#include "biomoe/train/memory_plan.h"
#include "biomoe/train/run_match.h"

namespace biomoe {
namespace {

namespace fs = std::filesystem;

void note(const std::string& line) {
  tell(stderr, "{}\n", one_line(line));
}

// Before anything is read: refuses what such a run cannot do.
ResolvedConfig<RunConfig> supported(ResolvedConfig<RunConfig> config) {
  require_supported(config.value, resolved_device(config.value.device));
  return config;
}

// Of what was written, by its checksums, and of the state that was read.
std::string checkpoint_id(const std::string& folder, const CheckpointHeader& header) {
  std::string text = header.state.dump();
  for (const auto& [name, digest] : CheckpointManifest::read(folder).files)
    text += fmt::format(" {} {} {}", name, digest.bytes, crc32_text(digest.crc32));
  return fmt::format("{} ({})", folder, crc32_text(crc32_update(0, text.data(), text.size())));
}

Dataset open_on_all(const DataConfig& config, const Ranks& ranks) {
  std::optional<Dataset> dataset;
  Comm& world = ranks.mesh.world();
  std::string id;
  work_together(world, "reading the data", [&] {
    dataset = open_dataset(config);
    if (world.size() > 1) id = data_id(*dataset);
  });
  require_same(world, "the data", id);
  return std::move(*dataset);
}

// Values of a checkpoint's state whose names may be absent. Throws user_error naming `origin`.
class StateReader {
 public:
  StateReader(const nlohmann::json& object, std::string origin)
      : object_(object), origin_(std::move(origin)) {}
  int64_t count(const char* key) const {
    const auto value = object_.find(key);
    if (value == object_.end()) return 0;
    if (!value->is_number_unsigned() || value->get<uint64_t>() >> 62) throw damaged(key);
    return value->get<int64_t>();
  }
  double number(const char* key) const {
    const auto value = object_.find(key);
    if (value == object_.end() || value->is_null()) return 0;
    if (!value->is_number()) throw damaged(key);
    return value->get<double>();
  }
  MaskCounts mask_counts(const char* key) const {
    const auto value = object_.find(key);
    if (value == object_.end()) return {};
    try {
      return mask_counts_from(*value);
    } catch (const nlohmann::json::exception&) {
      throw damaged(key);
    }
  }

 private:
  Error damaged(const char* key) const {
    return user_error(
        "{}: {} of its state is damaged; move the checkpoint away to continue from the one before", origin_,
        key);
  }
  const nlohmann::json& object_;
  std::string origin_;
};

bool holds_scales(const CheckpointHeader& header) {
  return std::find(header.groups.begin(), header.groups.end(), ModelImage::kFp8Group) != header.groups.end();
}

}  // namespace

ModelLimits planned_limits(const RunConfig& config, bool training, Device device) {
  return {.max_tokens = config.dataset.token_micro_batch_size,
          .max_seqlen = config.dataset.max_seq_length,
          .num_threads = resolved_threads(config.num_threads),
          .training = training,
          .recompute_layers = config.recompute_layers,
          .expert_ffn_mode = resolved_expert_ffn_mode(config.expert_ffn_mode, device, config.model,
                                                      config.fp8_config, config.portable_kernels),
          .device = device,
          .micro_batches = config.grad_acc_steps,
          .deterministic = config.deterministic,
          .portable_kernels = config.portable_kernels,
          .fp8 = resolved_fp8_config(config.fp8_config, device),
          .place = planned_place(config),
          .expert_messages = config.parallelism.dispatcher == DispatcherChoice::kNccl};
}

MeshPlace planned_place(const RunConfig& config) {
  return {.size = {.dp = std::max<int64_t>(1, config.parallelism.dp_size), .ep = config.parallelism.ep_size},
          .shards = config.parallelism.shard_parameters};
}

ModelLimits model_limits(const RunConfig& config, bool training) {
  return planned_limits(config, training, resolved_device(config.device));
}

void join_ranks(const Mesh& mesh, DispatcherChoice dispatcher, ModelLimits& limits) {
  limits.place = mesh.place(limits.place.shards);
  if (limits.place.size.ep == 1) return;
  limits.expert_ranks = &mesh.ep();
  if (limits.device == Device::kCpu) return;
  limits.expert_messages = dispatcher == DispatcherChoice::kAuto ? !nccl::can_share_memory(mesh.ep())
                                                                 : dispatcher == DispatcherChoice::kNccl;
}

bool can_record_steps(const ModelLimits& limits) {
  const bool messages = limits.place.size.ep > 1 && limits.expert_messages;
  return limits.expert_ffn_mode != ExpertFfnMode::kLoop && !messages;
}

Trainer::Trainer(ResolvedConfig<RunConfig> config, double started_seconds, std::shared_ptr<const Ranks> ranks)
    : resolved_(supported(std::move(config))),
      config_(resolved_.value),
      dataset_(open_on_all(config_.dataset, *ranks)),
      split_(split_id(config_.dataset, dataset_)),
      ranks_(std::move(ranks)),
      started_seconds_(started_seconds) {
  resolve_model(resolved_, dataset_.vocabulary);
  check_init_from(config_);
  require_targets(dataset_, config_.dataset);
  require_memory_here(plan_run_memory(config_, &dataset_), ranks_->on_host);
  const ModelConfig& model = config_.model;
  const Mesh& mesh = ranks_->mesh;
  ModelLimits limits = model_limits(config_, true);
  join_ranks(mesh, config_.parallelism.dispatcher, limits);
  model_ = std::make_unique<Model>(model, limits);
  const Device device = model_->limits().device;
  OptimizerOptions options = optimizer_options(config_, device);
  if (!mesh.alone()) options.world = &mesh.world();
  optimizer_ = std::make_unique<Optimizer>(model_->parameters(), config_.adamw, options);
  image_ = std::make_unique<ModelImage>(*model_, optimizer_.get(), &mesh);
  runner_ = std::make_unique<StepRunner>(*model_, *optimizer_, config_.cuda_graph && can_record_steps(limits),
                                         &mesh, config_.parallelism.timeout_s);
  loader_ = std::make_unique<Loader>(dataset_.train, dataset_.vocabulary,
                                     train_loader_options(config_.dataset, {mesh.rank(), mesh.size()}));
  micro_batches_.resize(static_cast<size_t>(config_.grad_acc_steps));
  for (Batch& batch : micro_batches_) batch.reserve(config_.dataset.token_micro_batch_size);
  const fs::path folder = config_.checkpoint.ckpt_dir.empty() ? fs::path(config_.run_dir) / "checkpoints"
                                                              : fs::path(config_.checkpoint.ckpt_dir);
  if (ranks_->first()) lock_.take(config_.run_dir);
  store_ = std::make_unique<CheckpointStore>(
      folder, CheckpointOptions{.max_checkpoints = config_.checkpoint.max_checkpoints, .warn = note});
  const bool saves = config_.checkpoint.save_final_model || config_.checkpoint.save_every_n_steps > 0;
  if (ranks_->first() && saves) store_->require_writable();
  work_together(mesh.world(), "making the first weights", [&] {
    if (config_.init_from.empty()) {
      image_->initialize(static_cast<uint64_t>(config_.seed));
    } else {
      image_->fill([&](float* flat) { import_hf(config_.init_from, model, model_->parameters(), flat); });
    }
  });
  resume();
  image_->upload_sync();
  if (step_ == 0 && config_.fp8_config.rounds_initial_weights()) image_->round_weights_to_codes_sync();
  if (!same_copies(*model_, mesh)) {
    throw user_error(
        "copies of weights differ between ranks before the first step; give all ranks the same init_from or "
        "checkpoint, and hosts of one kind");
  }
}

// The first rank looks, and all take what it found: "" for nothing.
std::string Trainer::latest_good() const {
  Comm& world = ranks_->mesh.world();
  std::string path;
  constexpr const char* kLooking = "looking for a checkpoint to resume from";
  work_together(world, kLooking, [&] {
    if (!ranks_->first()) return;
    if (const auto latest = store_->latest_good()) path = latest->path.string();
  });
  return broadcast_text(world, path, 0, kLooking);
}

void Trainer::resume() {
  const std::string latest = latest_good();
  if (latest.empty()) {
    if (ranks_->first()) check_fresh_start(config_, store_->folder());
    return;
  }
  if (!config_.checkpoint.resume_from_checkpoint) {
    throw user_error(
        "{} holds checkpoints already; choose another run_dir, or checkpoint.resume_from_checkpoint=true",
        store_->folder().string());
  }
  const CheckpointHeader header = read_checkpoint_header(latest);
  require_same(ranks_->mesh.world(), "the checkpoint", checkpoint_id(latest, header));
  const TrainingState state = TrainingState::from_json(header.state, latest);
  const std::string difference =
      model_difference(parse_hf_config(state.model.dump(), latest).model, config_.model);
  if (!difference.empty()) {
    throw user_error("{}: {}; use the same model configuration, or another run_dir", latest, difference);
  }
  // At step 0 nothing has been trained on yet.
  std::string changed;
  if (state.step > 0) changed = check_continuation(state, latest, config_, split_);
  std::vector<TensorGroup> groups = image_->groups();
  if (model_->fp8_state().delayed()) {
    if (holds_scales(header)) {
      check_amax_history(state, latest, config_);
    } else {
      std::erase_if(groups, [](const TensorGroup& group) { return group.name == ModelImage::kFp8Group; });
    }
  }
  const StateReader data(state.data, latest), extra(state.extra, latest);
  const LoaderPosition position{data.count("sample"), data.count("micro_batch")};
  tokens_seen_ = extra.count("tokens");
  loss_ = extra.number("loss");
  masked_before_ = extra.mask_counts("masked");
  if (state.extra.contains("first_loss")) first_loss_ = extra.number("first_loss");
  work_together(ranks_->mesh.world(), "loading the checkpoint", [&] { load_checkpoint(latest, groups); });
  step_ = state.step;
  saved_step_ = state.step;
  optimizer_->set_steps(state.optimizer_step);
  loader_->seek(position);
  if (!ranks_->first()) return;
  if (!changed.empty()) note(changed);
  if (groups.size() < image_->groups().size())
    note(fmt::format("{}: holds no scales of DelayedScaling, which begins with 1 and no amax", latest));
  note(fmt::format("resuming from {} at step {}", latest, step_));
}

nlohmann::json Trainer::state() const {
  TrainingState state;
  state.step = step_;
  state.optimizer_step = optimizer_->steps();
  state.seed = static_cast<uint64_t>(config_.seed);
  const MeshSize mesh = ranks_->mesh.place().size;
  state.world_size = mesh.world();
  state.dp = mesh.dp;
  state.ep = mesh.ep;
  state.data = {{"sample", loader_->position().sample}, {"micro_batch", loader_->position().micro_batch}};
  if (!split_.empty()) state.data["split"] = split_;
  state.model = model_json(config_.model);
  state.config_yaml = to_yaml(config_);
  state.extra = {{"tokens", tokens_seen_}, {"loss", loss_}, {"masked", mask_counts_json(mask_counts())}};
  if (first_loss_) state.extra["first_loss"] = *first_loss_;
  return state.to_json();
}

MaskCounts Trainer::mask_counts() const {
  MaskCounts own = loader_->counts(), counts = masked_before_;
  if (!ranks_->mesh.alone()) {
    static_assert(std::is_trivially_copyable_v<MaskCounts> && sizeof(MaskCounts) % sizeof(int64_t) == 0);
    Context host;
    ranks_->mesh.world().all_reduce(
        host, TensorView(&own, DType::kI64, Shape{static_cast<int64_t>(sizeof(own) / sizeof(int64_t))}),
        ReduceOp::kSum, "the counts of masked bases");
  }
  counts += own;
  return counts;
}

double Trainer::over_ranks(double value) const {
  return all_reduce_value(ranks_->mesh.world(), value, ReduceOp::kSum, "the figures of the step");
}

// An update from finite gradients can still leave the range of fp32, and the next step's loss would tell: too
// late for the checkpoints that a save prunes.
void Trainer::require_finite_weights() const {
  std::string place = model_->first_nonfinite_weight_sync();
  if (!ranks_->mesh.alone()) {
    for (const std::string& found : all_gather_text(ranks_->mesh.world(), place, "the check of the weights"))
      if (place.empty()) place = found;
  }
  if (place.empty()) return;
  throw failure(
      "step {}: the update left {} with values that are not finite; this step is not saved, and the "
      "checkpoint "
      "before it stands. Lower adamw_kwargs.lr or weight_decay",
      step_, place);
}

void Trainer::save() {
  if (saved_step_ == step_) return;
  runner_->settle();
  require_finite_weights();
  image_->download_sync();
  if (!ranks_->mesh.alone()) {
    save_from_ranks(*store_, ranks_->mesh.world(), step_, image_->owned_groups(), state());
  } else if (saver_) {
    saver_->save(step_, state());
  } else {
    store_->save(step_, image_->groups(), state());
  }
  saved_step_ = step_;
}

Evaluation Trainer::validate(int64_t max_batches) {
  runner_->settle();
  const Mesh& mesh = ranks_->mesh;
  // Every rank takes its share of the batches, at least one.
  const int64_t batches = (max_batches + mesh.size() - 1) / mesh.size();
  Evaluation evaluation = evaluate(*model_, dataset_.validation, dataset_.vocabulary,
                                   validation_loader_options(config_.dataset, {mesh.rank(), mesh.size()}),
                                   {.max_batches = batches, .progress = {}});
  evaluation.nats = over_ranks(evaluation.nats);
  evaluation.bases = static_cast<int64_t>(over_ranks(static_cast<double>(evaluation.bases)));
  return evaluation;
}

void Trainer::train_one_step(RunLog* log) {
  const double data_begin = now_seconds();
  for (Batch& batch : micro_batches_) loader_->next(batch);
  const double step_begin = now_seconds();
  if (!first_step_seconds_) {
    first_step_seconds_ = step_begin - started_seconds_;
    if (log) log->print_line(fmt::format("first step after {:.2f} s", *first_step_seconds_));
  }
  const double lr = scheduled_lr(config_.schedule, config_.adamw.lr, config_.num_train_steps, step_);
  runner_->submit(micro_batches_,
                  {.step = step_ + 1,
                   .lr = lr,
                   .max_grad_norm = config_.max_grad_norm,
                   .poison_activations = resolved_poison_activations(config_.poison_activations)});
  const StepResult result = runner_->finish_sync();
  const double step_end = now_seconds();
  ++step_;
  tokens_seen_ += result.tokens;
  if (result.targets > 0) {  // otherwise nothing was predicted
    loss_ = result.loss;
    if (!first_loss_) first_loss_ = loss_;
  }
  StepRecord record{.step = step_,
                    .tokens = tokens_seen_,
                    .lr = lr,
                    .step_seconds = step_end - step_begin,
                    .data_seconds = step_begin - data_begin};
  for (const Batch& batch : micro_batches_)
    record.flops += step_flops(config_.model, model_->parameters(), batch);
  record.flops = over_ranks(record.flops);
  const MaskCounts masked = mask_counts();
  if (log) log->step(record, result, model_->routing(), masked);
}

void Trainer::train(RunLog* log) {
  const auto due = [this](int64_t every) { return every > 0 && step_ % every == 0; };
  while (step_ < config_.num_train_steps) {
    train_one_step(log);
    const bool last = step_ == config_.num_train_steps;  // then all of it is validated after the save
    if (dataset_.validation && due(config_.validation.every_n_steps) && !last) {
      const Evaluation validation = validate(config_.validation.max_batches);
      if (log) {
        log->validation(step_, validation);
        log->print_line(fmt::format("step {}  validation {}", step_, score_text(validation)));
      }
    }
    if (due(config_.checkpoint.save_every_n_steps)) save();
  }
  runner_->settle();
  if (log) log->finish(step_);
}

void Trainer::prepare_folder() {
  std::error_code error;
  fs::create_directories(config_.run_dir, error);
  if (error) throw user_error("run_dir={}: cannot create the folder: {}", config_.run_dir, error.message());
  lock_.take(config_.run_dir);
  // Of a run that is complete already it says what the steps were made with.
  const fs::path config = fs::path(config_.run_dir) / "config.yaml";
  if (step_ < config_.num_train_steps || !fs::exists(config)) replace_file(config, to_yaml(resolved_));
}

TrainSummary Trainer::run() {
  const double begin = now_seconds();
  if (ranks_->first()) {
    prepare_folder();
    print_head();
    const int64_t every = config_.checkpoint.save_every_n_steps;
    if (!config_.checkpoint.save_final_model &&
        (every == 0 || config_.num_train_steps / every == step_ / every))
      note(
          "nothing will be saved: checkpoint.save_final_model=false, and no step is one of "
          "checkpoint.save_every_n_steps");
  }
  const bool alone = ranks_->mesh.alone();
  if (alone && config_.checkpoint.async_save && config_.checkpoint.save_every_n_steps > 0) {
    saver_ = std::make_unique<AsyncSaver>(*store_, image_->groups());
  }
  std::optional<RunLog> log;
  if (step_ < config_.num_train_steps) {
    const Device device = model_->limits().device;
    if (ranks_->first()) {
      log.emplace(config_.run_dir, step_, config_.num_train_steps, config_.logger.frequency,
                  device == Device::kCpu ? std::nullopt : peak_bf16_flops(device_info(device).name));
    }
    train(log ? &*log : nullptr);
  } else if (ranks_->first()) {
    tell(stdout, "training is complete at step {}\n", step_);
  }
  if (config_.checkpoint.save_final_model) save();
  if (saver_) saver_->wait();
  TrainSummary summary;
  if (const auto latest = store_->latest()) summary.checkpoint = latest->path.string();
  if (dataset_.validation) {
    summary.validation = validate(0);
    if (log) log->validation(step_, *summary.validation);
  }
  summary.steps = step_;
  summary.final_loss = loss_;
  if (ranks_->first()) write_summary(summary, now_seconds() - begin);
  if (config_.sanity_check) {
    summary.sanity = check_sanity({.model = *model_,
                                   .mesh = ranks_->mesh,
                                   .first_loss = first_loss_,
                                   .last_loss = loss_,
                                   .steps = step_,
                                   .complete_before = !first_step_seconds_,
                                   .checkpoint = summary.checkpoint});
  }
  return summary;
}

void Trainer::print_head() const {
  tell(stdout, "{}", dataset_.report.text());
  const ParameterList& parameters = model_->parameters();
  const int threads = model_->limits().num_threads;
  const MeshSize mesh = ranks_->mesh.place().size;
  const std::string ranks =
      ranks_->mesh.alone()
          ? ""
          : fmt::format("{} ranks (dp {} x ep {}, {} on this host{}), each with ", mesh.world(), mesh.dp,
                        mesh.ep, ranks_->on_host, parameters.shards() ? ", parameters sharded" : "");
  if (std::string why; config_.device == DeviceChoice::kAuto && model_->limits().device == Device::kCpu &&
                       !device_available(Device::kCuda, &why)) {
    tell(stdout, "device=auto: on the CPU, since {}\n", why);
  }
  tell(stdout, "{} parameters, {} active a token; {}{} threads\n", parameters.num_parameters(),
       parameters.num_active_parameters(), ranks, threads);
  if (config_.fp8_config.enabled) {
    tell(stdout, "{}\n", model_->fp8_state().describe());
  }
  if (const ModelLimits& limits = model_->limits(); limits.device != Device::kCpu && limits.place.size.ep > 1)
    tell(stdout, "rows go to the experts of other GPUs {}\n",
         limits.expert_messages ? "in messages (nccl)" : "by direct stores (p2p)");
  if (!ranks_->mesh.alone() && config_.checkpoint.async_save && config_.checkpoint.save_every_n_steps > 0)
    tell(stdout, "checkpoint.async_save: ranks save together, in the foreground\n");
}

void Trainer::write_summary(const TrainSummary& summary, double seconds) const {
  nlohmann::json json = {{"version", kVersion},
                         {"steps", summary.steps},
                         {"tokens", tokens_seen_},
                         {"parameters", model_->parameters().num_parameters()},
                         {"active_parameters", model_->parameters().num_active_parameters()},
                         {"final_loss", summary.final_loss},
                         {"seconds", seconds},
                         {"first_step_after_seconds", nullptr},
                         {"checkpoint", summary.checkpoint},
                         {"data", dataset_.report.json()}};
  if (first_step_seconds_) json["first_step_after_seconds"] = *first_step_seconds_;
  if (const Device device = model_->limits().device; device != Device::kCpu) {
    json["device_memory_used_bytes"] = device_info(device).used_bytes();
    json["device_memory_planned_bytes"] = plan_run_memory(config_, &dataset_).gpu_total();
  }
  if (summary.validation) {
    json["validation"] = score_json(summary.validation->bases, summary.validation->nats);
  }
  replace_file(fs::path(config_.run_dir) / "summary.json", json.dump(2) + "\n");
}

}  // namespace biomoe
