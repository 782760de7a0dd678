#include "biomoe/train/run_config.h"

#include <sched.h>

#include <algorithm>
#include <cmath>

#include "biomoe/checkpoint/hf_config.h"
#include "biomoe/core/error.h"
#include "biomoe/data/dataset.h"
#include "biomoe/model/compute_types.h"
#include "biomoe/model/fp8_state.h"
#include "biomoe/moe/sequential.h"
#include "biomoe/ops/cuda_sizes.h"
#include "biomoe/ops/device.h"

namespace biomoe {
namespace {

constexpr int64_t kMaxThreads = 1024;
constexpr double kMaxTimeout = 86400;
constexpr int kTunedCapability = 90;  // of the GPU whose kernels are tuned: Hopper

}  // namespace

void RunConfig::validate() const {
  ModelConfig known = model;
  if (known.vocab_size == 0) known.vocab_size = 2;  // comes with the vocabulary
  known.validate();
  struct Bound {
    const char* key;
    int64_t value, low, high;
  };
  const Bound bounds[] = {{"num_train_steps", num_train_steps, 0, int64_t{1} << 40},
                          {"grad_acc_steps", grad_acc_steps, 1, 1 << 20},
                          {"seed", seed, 0, INT64_MAX},
                          {"num_threads", num_threads, 0, kMaxThreads},
                          {"recompute_layers", recompute_layers, 0, model.num_hidden_layers},
                          {"checkpoint.save_every_n_steps", checkpoint.save_every_n_steps, 0, INT64_MAX},
                          {"checkpoint.max_checkpoints", checkpoint.max_checkpoints, 0, INT64_MAX},
                          {"logger.frequency", logger.frequency, 1, INT64_MAX},
                          {"validation.every_n_steps", validation.every_n_steps, 0, INT64_MAX},
                          {"validation.max_batches", validation.max_batches, 0, INT64_MAX}};
  for (const auto& bound : bounds) {
    if (bound.value < bound.low || bound.value > bound.high) {
      throw user_error("{}={} is outside [{}, {}]", bound.key, bound.value, bound.low, bound.high);
    }
  }
  if (!(std::isfinite(max_grad_norm) && max_grad_norm >= 0)) {
    throw user_error("max_grad_norm={} must be at least 0 (0: no clipping)", max_grad_norm);
  }
  if (!(std::isfinite(parallelism.timeout_s) && parallelism.timeout_s > 0 &&
        parallelism.timeout_s <= kMaxTimeout)) {
    throw user_error("parallelism.timeout_s={} is outside (0, {}]", parallelism.timeout_s, kMaxTimeout);
  }
  if (parallelism.ep_size < 1 || parallelism.dp_size < 0) {
    throw user_error("parallelism: ep_size={} must be at least 1 and dp_size={} at least 0",
                     parallelism.ep_size, parallelism.dp_size);
  }
  if (run_dir.empty()) throw user_error("run_dir is empty; name a folder for the run");
  fp8_config.validate();
  const auto& precisions = model.layer_precision;
  if (!fp8_config.enabled && std::find(precisions.begin(), precisions.end(), "fp8") != precisions.end()) {
    throw user_error("config_kwargs.layer_precision asks for fp8; set fp8_config.enabled=true");
  }
  if (fp8_config.quantized_model_init_kwargs.enabled &&
      (optimizer_states != OptimizerStates::kFp32 || !optimizer_store_param_remainders)) {
    throw user_error(
        "fp8_config.quantized_model_init_kwargs.enabled=true keeps weights as 8-bit codes and fp32 masters "
        "alone; set {}",
        optimizer_states != OptimizerStates::kFp32 ? "optimizer_states=fp32"
                                                   : "optimizer_store_param_remainders=true");
  }
  adamw.validate();
  schedule.validate();
  validate_data_config(dataset);
}

OptimizerOptions optimizer_options(const RunConfig& config, Device device) {
  return {.device = device,
          .states = config.optimizer_states,
          .store_param_remainders = config.optimizer_store_param_remainders};
}

int resolved_threads(int64_t num_threads) {
  if (num_threads < 0 || num_threads > kMaxThreads) {
    throw user_error("{} threads are outside [0, {}] (0: all that this process may use)", num_threads,
                     kMaxThreads);
  }
  if (num_threads > 0) return static_cast<int>(num_threads);
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

Device resolved_device(DeviceChoice choice) {
  if (choice == DeviceChoice::kCpu) return Device::kCpu;
  std::string why;
  if (device_available(Device::kCuda, &why)) return Device::kCuda;
  if (choice == DeviceChoice::kCuda) throw user_error("device=cuda: {}, or set device=cpu", why);
  return Device::kCpu;
}

int target_capability(Device device) {
  if (device == Device::kCpu) return 0;
  return device_available(device) ? device_info(device).compute_capability : kTunedCapability;
}

ExpertFfnMode resolved_expert_ffn_mode(ExpertFfnChoice choice, Device device, const ModelConfig& model,
                                       const Fp8Config& fp8, bool portable_kernels) {
  const int capability = target_capability(device);
  const bool hopper = capability == kTunedCapability && !portable_kernels;
  const bool mx = !portable_kernels && mx_experts(model, fp8, device);
  const std::string obstacle = fused_mlp_device_obstacle(
      capability, model.intermediate_size, compute_types(device, model, false).gate_up_interleave);
  const auto mode = [&] {
    if (choice != ExpertFfnChoice::kAuto) return static_cast<ExpertFfnMode>(static_cast<int>(choice) - 1);
    if (device == Device::kCuda && !hopper) return mx ? ExpertFfnMode::kGroupedLinear : ExpertFfnMode::kLoop;
    return obstacle.empty() ? ExpertFfnMode::kFusedGroupedMlp : ExpertFfnMode::kGroupedLinear;
  }();
  const bool has_kernels = hopper || (mx && mode == ExpertFfnMode::kGroupedLinear);
  if (device == Device::kCuda && mode != ExpertFfnMode::kLoop && !has_kernels) {
    throw user_error("expert_ffn_mode={}: {}; set expert_ffn_mode=loop or auto",
                     kExpertFfnModeNames[static_cast<size_t>(mode)],
                     portable_kernels
                         ? "portable_kernels=true has no kernels for all experts at once"
                         : "this GPU has no kernels for all experts at once (compute capability 9.0 has)");
  }
  if (mode == ExpertFfnMode::kFusedGroupedMlp && !obstacle.empty()) {
    throw user_error("expert_ffn_mode=fused_grouped_mlp: {}; set expert_ffn_mode=grouped_linear or auto",
                     obstacle);
  }
  return mode;
}

namespace {

void require_head_width(const ModelConfig& model, Device device, bool portable_kernels) {
  const int64_t width = model.key_width();
  const bool tuned = target_capability(device) == kTunedCapability && !portable_kernels;
  const int64_t widest = tuned ? cuda::kWidestHead : cuda::kWidestTrainedElsewhere;
  if (device == Device::kCpu || (width % cuda::kHeadWidthStep == 0 && width <= widest)) return;
  throw user_error(
      "heads are {} wide; training with device=cuda takes multiples of {} up to {}{}: set "
      "config_kwargs.head_dim, or device=cpu",
      width, cuda::kHeadWidthStep, widest,
      tuned              ? ""
      : portable_kernels ? " with portable_kernels"
                         : " on this GPU");
}

}  // namespace

void require_supported(const RunConfig& config, Device device) {
  require_head_width(config.model, device, config.portable_kernels);
  if (config.sanity_check && config.num_train_steps < 2) {
    throw user_error("sanity_check=true compares the first loss with the last; set num_train_steps above 1");
  }
  if (device == Device::kCpu && config.optimizer_states != OptimizerStates::kFp32) {
    throw user_error("optimizer_states={} needs device=cuda: on the CPU all states are fp32",
                     kOptimizerStatesNames[static_cast<size_t>(config.optimizer_states)]);
  }
  resolved_expert_ffn_mode(config.expert_ffn_mode, device, config.model, config.fp8_config,
                           config.portable_kernels);
  resolved_fp8_config(config.fp8_config, device);
}

Fp8Config resolved_fp8_config(const Fp8Config& config, Device device) {
  const bool mx = config.fp8_recipe == Fp8Recipe::kMxfp8BlockScaling;
  if (config.enabled && device == Device::kCuda && !mx && !config.fp8_recipe_kwargs.power_2_scale) {
    throw user_error(
        "fp8_config.fp8_recipe_kwargs.power_2_scale=false: on a GPU {} takes scales that are powers of two, "
        "without which BF16 does not hold its values exactly; set power_2_scale=true or device=cpu",
        kFp8RecipeNames[static_cast<size_t>(config.fp8_recipe)]);
  }
  return config;
}

bool resolved_poison_activations(const std::optional<bool>& value) {
#ifdef NDEBUG
  constexpr bool kDebugBuild = false;
#else
  constexpr bool kDebugBuild = true;
#endif
  return value.value_or(kDebugBuild);
}

void resolve_model(RunConfig& config, const Vocabulary& vocabulary) {
  ModelConfig& model = config.model;
  if (model.vocab_size == 0) model.vocab_size = vocabulary.size();
  if (model.vocab_size < vocabulary.size()) {
    throw user_error(
        "config_kwargs.vocab_size={} is below the {} entries of the vocabulary {}; set it to 0 for as many "
        "as "
        "the vocabulary has, or choose another dataset.tokenizer_name_or_path",
        model.vocab_size, vocabulary.size(), vocabulary.name());
  }
  model.validate();
  if (config.dataset.max_seq_length > model.max_position_embeddings) {
    throw user_error("dataset.max_seq_length={} is above config_kwargs.max_position_embeddings={}",
                     config.dataset.max_seq_length, model.max_position_embeddings);
  }
}

void resolve_model(ResolvedConfig<RunConfig>& resolved, const Vocabulary& vocabulary) {
  const bool derived = resolved.value.model.vocab_size == 0;
  resolve_model(resolved.value, vocabulary);
  if (!derived) return;
  const FieldList list = FieldList::of(resolved.value);
  for (size_t i = 0; i < resolved.origins.size(); ++i) {
    if (list.fields()[i].key == "config_kwargs.vocab_size")
      resolved.origins[i] = {.kind = Origin::Kind::kDerived,
                             .file = fmt::format("the vocabulary {}", vocabulary.name())};
  }
}

std::string unused_fp8_keys(const ResolvedConfig<RunConfig>& resolved) {
  RunConfig copy = resolved.value;  // visit() is for reading and writing
  const FieldList list = FieldList::of(copy);
  // Of sections with a switch, the outer one first.
  for (const std::string section : {"fp8_config.", "fp8_config.quantized_model_init_kwargs."}) {
    const std::string switch_key = section + "enabled";
    std::string keys;
    bool switched = false;  // on, or off on purpose
    for (size_t i = 0; i < resolved.origins.size(); ++i) {
      const std::string& key = list.fields()[i].key;
      if (!key.starts_with(section) || resolved.origins[i].kind == Origin::Kind::kDefault) continue;
      if (key == switch_key) switched = true;
      keys += (keys.empty() ? "" : ", ") + key;
    }
    if (!switched && !keys.empty()) return fmt::format("{}: without effect; set {}=true", keys, switch_key);
    if (!copy.fp8_config.enabled) break;
  }
  return "";
}

ResolvedConfig<RunConfig> load_run_config(const ConfigSource& source) {
  const ConfigNode tree = load_config(source);
  RunConfig defaults;
  ResolvedConfig<RunConfig> resolved = resolve(tree, defaults);
  if (!resolved.value.config_name_or_path.empty()) {
    defaults.model = read_hf_config(resolved.value.config_name_or_path).model;
    resolved = resolve(tree, defaults);
  }
  resolved.value.validate();
  return resolved;
}

}  // namespace biomoe
