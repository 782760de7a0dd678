// Everything that a run's configuration file may say.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "biomoe/config/config.h"
#include "biomoe/core/context.h"
#include "biomoe/data/data_config.h"
#include "biomoe/data/vocabulary.h"
#include "biomoe/dist/mesh.h"
#include "biomoe/model/model_config.h"
#include "biomoe/moe/moe_layer.h"
#include "biomoe/optim/optim_config.h"
#include "biomoe/optim/optimizer.h"
#include "biomoe/quant/recipe.h"

namespace biomoe {

enum class DeviceChoice : uint8_t { kAuto, kCpu, kCuda };
inline constexpr std::array<std::string_view, 3> kDeviceChoiceNames{"auto", "cpu", "cuda"};

// kAuto, and then as ExpertFfnMode.
enum class ExpertFfnChoice : uint8_t { kAuto, kLoop, kGroupedLinear, kFusedGroupedMlp };
inline constexpr std::array<std::string_view, 4> kExpertFfnChoiceNames{
    "auto", kExpertFfnModeNames[0], kExpertFfnModeNames[1], kExpertFfnModeNames[2]};

struct CheckpointConfig {
  std::string ckpt_dir;
  bool save_final_model = true;
  bool resume_from_checkpoint = true;
  int64_t save_every_n_steps = 0;
  int64_t max_checkpoints = 2;
  bool async_save = true;

  template <typename Visitor>
  void visit(Visitor& v) {
    v.field("ckpt_dir", ckpt_dir, "folder of the checkpoints; empty: RUN_DIR/checkpoints");
    v.field("save_final_model", save_final_model, "save a checkpoint after the last step");
    v.field("resume_from_checkpoint", resume_from_checkpoint, "continue from the newest good checkpoint");
    v.field("save_every_n_steps", save_every_n_steps, "0: only the final one");
    v.field("max_checkpoints", max_checkpoints, "how many to keep; 0: all");
    v.field("async_save", async_save, "write in the background, from a copy");
  }
};

struct LoggerConfig {
  int64_t frequency = 10;
  template <typename Visitor>
  void visit(Visitor& v) {
    v.field("frequency", frequency, "steps between lines of metrics.jsonl and TensorBoard events");
  }
};

struct ValidationConfig {
  int64_t every_n_steps = 0;
  int64_t max_batches = 0;
  template <typename Visitor>
  void visit(Visitor& v) {
    v.field("every_n_steps", every_n_steps, "steps between validations; 0: only after the last step");
    v.field("max_batches", max_batches,
            "micro-batches of one validation in the loop; 0: all (as after the last step)");
  }
};

enum class DispatcherChoice : uint8_t { kAuto, kNccl, kP2p };
inline constexpr std::array<std::string_view, 3> kDispatcherChoiceNames{"auto", "nccl", "p2p"};

struct ParallelismConfig {
  int64_t dp_size = 0;
  int64_t ep_size = 1;
  DispatcherChoice dispatcher = DispatcherChoice::kAuto;
  bool shard_parameters = false;
  bool share_gpus = false;
  double timeout_s = 30;
  template <typename Visitor>
  void visit(Visitor& v) {
    v.field("dp_size", dp_size, "ranks that hold the same experts; 0: as many as ep_size leaves");
    v.field(
        "ep_size", ep_size,
        "ranks that the experts are split over; dp_size * ep_size is the number of ranks, which mpirun or "
        "srun starts");
    v.choice("dispatcher", dispatcher, kDispatcherChoiceNames,
             "how rows get to experts on other GPUs: stored there directly (p2p, within a host), in messages "
             "(nccl), "
             "or p2p where it is possible; ranks on CPUs send messages over MPI");
    v.field("shard_parameters", shard_parameters,
            "of weights and gradients that several ranks hold each keeps a part, as of the optimiser's "
            "state, and "
            "the whole of a layer only while it is computed (ZeRO-3): less memory for more exchange");
    v.field("share_gpus", share_gpus,
            "ranks of a host may have a GPU in common, to try a mesh where there are fewer GPUs: the same "
            "training, slowly");
    v.field("timeout_s", timeout_s,
            "seconds after which a rank gives up waiting for another and ends the run");
  }
};

struct RunConfig {
  std::string run_dir = "runs/default";
  std::string config_name_or_path;
  std::string init_from;
  ModelConfig model;
  ExpertFfnChoice expert_ffn_mode = ExpertFfnChoice::kAuto;
  int64_t num_train_steps = 100;
  int64_t grad_acc_steps = 1;
  double max_grad_norm = 1.0;
  int64_t seed = 0;
  DeviceChoice device = DeviceChoice::kAuto;
  OptimizerStates optimizer_states = OptimizerStates::kFp32;
  bool optimizer_store_param_remainders = true;
  bool cuda_graph = true;
  bool deterministic = false;
  bool portable_kernels = false;
  int64_t num_threads = 0;
  int64_t recompute_layers = 0;
  std::optional<bool> poison_activations;
  Fp8Config fp8_config;
  bool sanity_check = false;
  ParallelismConfig parallelism;
  DataConfig dataset;
  AdamwConfig adamw;
  ScheduleConfig schedule;
  CheckpointConfig checkpoint;
  LoggerConfig logger;
  ValidationConfig validation;

  void validate() const;  // throws user_error naming the key

  template <typename Visitor>
  void visit(Visitor& v) {
    v.field("run_dir", run_dir,
            "folder of the run: config.yaml, metrics.jsonl, TensorBoard events, checkpoints, summary.json");
    v.field(
        "config_name_or_path", config_name_or_path,
        "folder with a Hugging Face config.json that config_kwargs starts from; empty: the defaults below");
    v.field("init_from", init_from, "folder of a Hugging Face checkpoint whose weights training starts from");
    v.section("config_kwargs", model);
    v.choice("expert_ffn_mode", expert_ffn_mode, kExpertFfnChoiceNames,
             "how experts run: one GEMM per expert, one grouped GEMM, or grouped GEMMs with the activation "
             "inside; "
             "auto: the best that the device has");
    v.field("num_train_steps", num_train_steps, "updates");
    v.field("grad_acc_steps", grad_acc_steps, "micro-batches of one update");
    v.field("max_grad_norm", max_grad_norm, "clip the global gradient norm to this; 0: no clipping");
    v.field("seed", seed, "seed of the initial weights");
    v.choice("device", device, kDeviceChoiceNames,
             "where to run; auto: the GPU if there is one that this program can use");
    v.choice("optimizer_states", optimizer_states, kOptimizerStatesNames,
             "GPU: masters and moments in fp32, or moments in bf16 and no masters, as torch keeps them for a "
             "bf16 model");
    v.field(
        "optimizer_store_param_remainders", optimizer_store_param_remainders,
        "GPU: keep of each fp32 master the 16 bits that its bf16 weight lacks, instead of a copy: the same "
        "training bit for bit in 2 bytes a parameter less (on the CPU weights are the masters: no effect)");
    v.field("cuda_graph", cuda_graph, "GPU: record a step once and replay it");
    v.field("deterministic", deterministic,
            "GPU: bitwise the same run every time, for some speed (on the CPU every run is)");
    v.field("portable_kernels", portable_kernels,
            "GPU: only kernels that every GPU from compute capability 8.0 runs, on any of them: attention in "
            "tiles, experts in a loop");
    v.field("num_threads", num_threads, "CPU threads; 0: all that this process may use");
    v.field("recompute_layers", recompute_layers,
            "the first layers that keep only their input and run again in backward; they share one layer's "
            "memory, so memory is saved from 2 on (1 saves none)");
    v.field("poison_activations", poison_activations,
            "fill activation memory with NaN before every step, so that a value read before it is written "
            "shows; null: true in debug builds (without NDEBUG), false in others");
    v.field("sanity_check", sanity_check,
            "after training, check that the loss fell, that all ranks hold the same weights and that the "
            "checkpoint reads back, and say PASS or what is wrong (exit status 1)");
    v.section("parallelism", parallelism);
    v.section("fp8_config", fp8_config);
    v.section("dataset", dataset);
    v.section("adamw_kwargs", adamw);
    v.section("lr_scheduler_kwargs", schedule);
    v.section("checkpoint", checkpoint);
    v.section("logger", logger);
    v.section("validation", validation);
  }
};

// What these keys say of the optimiser, for a run on this device.
OptimizerOptions optimizer_options(const RunConfig& config, Device device);

// Threads that num_threads stands for on this machine.
int resolved_threads(int64_t num_threads);

// The device that `device` stands for here. Throws user_error when it is asked for and cannot be used.
Device resolved_device(DeviceChoice choice);

// Compute capability (10 * major + minor) that a run on `device` is planned for: of the GPU here, or where
// there is none, of Hopper, whose kernels are tuned. 0 for the CPU.
int target_capability(Device device);

// How the experts run there (see target_capability), with or without portable_kernels. Throws user_error when
// it cannot run them as asked.
ExpertFfnMode resolved_expert_ffn_mode(ExpertFfnChoice choice, Device device, const ModelConfig& model,
                                       const Fp8Config& fp8, bool portable_kernels = false);

// Throws user_error, naming the key, for what a run on this device cannot do: a width of heads, an
// optimizer_states, an expert_ffn_mode or an fp8_config that the device lacks, a sanity_check of fewer than
// two steps.
void require_supported(const RunConfig& config, Device device);

// fp8_config as it runs on the device. Throws user_error when it cannot be emulated there exactly.
Fp8Config resolved_fp8_config(const Fp8Config& config, Device device);

// What poison_activations stands for in this build.
bool resolved_poison_activations(const std::optional<bool>& value);

// Takes the size of the vocabulary where vocab_size is 0, and says so in the origin of that key. Throws
// user_error for a model that is out of range or does not fit the vocabulary or the windows.
void resolve_model(RunConfig& config, const Vocabulary& vocabulary);
void resolve_model(ResolvedConfig<RunConfig>& resolved, const Vocabulary& vocabulary);

// One line naming the keys of fp8_config that are set and change nothing, since fp8_config.enabled is not set
// at all; "" where there are none.
std::string unused_fp8_keys(const ResolvedConfig<RunConfig>& resolved);

// Loads and resolves; config_name_or_path's config.json lies under config_kwargs.
ResolvedConfig<RunConfig> load_run_config(const ConfigSource& source);

}  // namespace biomoe
