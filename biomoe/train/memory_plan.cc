#include "biomoe/train/memory_plan.h"

#include <algorithm>

#include "biomoe/checkpoint/async_saver.h"
#include "biomoe/core/system_memory.h"
#include "biomoe/data/batch.h"
#include "biomoe/dist/group_comm.h"
#include "biomoe/model/fp8_state.h"
#include "biomoe/model/model.h"
#include "biomoe/model/model_layout.h"
#include "biomoe/ops/cuda_sizes.h"
#include "biomoe/ops/device.h"
#include "biomoe/optim/optimizer.h"
#include "biomoe/train/evaluation.h"
#include "biomoe/train/model_image.h"
#include "biomoe/train/trainer.h"

namespace biomoe {
namespace {

uint64_t total_bytes(const std::vector<MemoryRow>& rows) {
  uint64_t bytes = 0;
  for (const MemoryRow& row : rows) bytes += row.bytes;
  return bytes;
}

constexpr uint64_t kMiB = uint64_t{1} << 20;

// The program before it holds anything of the run: what is resident when it starts (pages of the executable
// and its libraries: 8 MiB, and with CUDA's libraries over 180), and 1.5 MiB that a run of one thread on a
// model of width 8 adds (yaml-cpp, htslib, small allocations). A thread adds its stack, its heap and the
// operands that it packs for products. Measured on x86-64, Debian 12.
const uint64_t kResidentAtStart = resident_memory();
constexpr uint64_t kProgramBytes = 3 * kMiB / 2;
constexpr uint64_t kThreadBytes = kMiB / 2;

// Open MPI 4.1 in a rank: its libraries, and its buffers that it shares with the others on a host. Read off a
// run of two and of four ranks on one host, to a MiB.
constexpr uint64_t kMpiBytes = 11 * kMiB;

// On the GPU, the driver's context and the kernels of this program, cuBLASLt and cuDNN: what an H200 with
// driver 580 had in use beyond what is allocated here, read once and to a tenth of a GiB. On the host, the
// driver's own memory: a guess.
constexpr uint64_t kGpuContextBytes = 608 * kMiB;
constexpr uint64_t kGpuHostBytes = 500 * kMiB;

// NCCL's buffers for a group of ranks on each of its GPUs: read off two H200, NCCL 2.28.
constexpr uint64_t kNcclGroupBytes = 680 * kMiB;

// Groups that NCCL makes: of all ranks, for the experts, and for what runs beside operations of all ranks and
// of replicas. Those of all ranks share one with the others of their kind.
uint64_t nccl_bytes(const MeshSize& mesh) {
  const int64_t world = mesh.world();
  const auto own = [world](int64_t size) { return size > 1 && size < world ? 1 : 0; };
  return world == 1 ? 0 : static_cast<uint64_t>(2 + own(mesh.ep) + own(mesh.dp)) * kNcclGroupBytes;
}

// The copy that async_save writes from: weights and both moments.
uint64_t staging_bytes(const ParameterList& parameters) {
  TensorGroup group;
  for (const auto& spec : parameters.specs()) {
    group.tensors.push_back({spec.name, TensorView(nullptr, DType::kF32, spec.shape)});
  }
  return AsyncSaver::staging_bytes({group, group, group});
}

// Where the data are not here: one record of one window.
WindowIndex one_window(const DataConfig& data) {
  return WindowIndex({Segment{.length = data.max_seq_length}}, {.max_seq_length = data.max_seq_length,
                                                                .stride = data.stride,
                                                                .add_bos = data.add_bos,
                                                                .add_eos = data.add_eos});
}

uint64_t message_bytes(const MeshSize& mesh) {
  if (mesh.world() == 1) return 0;
  return kMpiBytes + GroupComm::planned_bytes(mesh.world()) + GroupComm::planned_bytes(mesh.dp) +
         GroupComm::planned_bytes(mesh.ep);
}

uint64_t validation_bytes(const DataConfig& data, const WindowIndex& windows) {
  return Loader::planned_bytes(validation_loader_options(data), windows) +
         Batch::planned_bytes(data.token_micro_batch_size) +
         static_cast<uint64_t>(windows.num_segments()) * Evaluation::kBytesARecord;
}

// Sizes are counted in 64 bits. What is beyond 2^60 bytes by a rough count in floating point is refused
// before that; the rough count is at most a few times the true one.
void refuse_absurd_sizes(const ModelConfig& m, int64_t batch_tokens, int64_t micro_batches,
                         const std::string& remedy) {
  const auto real = [](int64_t value) { return static_cast<double>(value); };
  const double D = real(m.hidden_size), F = real(m.intermediate_size), E = real(m.num_local_experts);
  const double heads = real(m.num_attention_heads + 2 * m.num_key_value_heads) * real(m.key_width());
  const double k = real(m.num_experts_per_tok), L = real(m.num_hidden_layers), V = real(m.vocab_size);
  const double parameters = 2 * V * D + L * (3 * E * F * D + 2 * heads * D + E * D);
  const double a_token = (L + 2) * (k * (6 * F + 4 * D) + 10 * D + 4 * heads + 4 * E) + V;
  const double tokens = real(batch_tokens);
  const double bytes = 4 * (8 * parameters + tokens * a_token) + 64 * tokens * real(micro_batches);
  if (bytes < 0x1p60) return;
  throw user_error(
      "the run needs about {:.0e} bytes of memory: the model has about {:.1e} parameters and a "
      "micro-batch {} tokens; choose {}",
      bytes, parameters, batch_tokens, remedy);
}

constexpr const char* kSizesOfConfig = "smaller sizes in config_kwargs or dataset.token_micro_batch_size";

MemoryRemedies config_remedies(const RunConfig& config, const ModelLimits& limits) {
  // Weights in 8 bits need the masters.
  const char* also = config.fp8_config.quantized_model_init_kwargs.enabled
                         ? " with fp8_config.quantized_model_init_kwargs.enabled=false"
                         : "";
  const bool keeps = quantized_weights(config.model, fp8_shape(config.model, limits)).kept > 0;
  return {.sizes = kSizesOfConfig,
          .model = "a smaller model (config_kwargs)",
          .states = fmt::format("optimizer_states=bf16{}", also),
          .masters = fmt::format("optimizer_store_param_remainders=true, or optimizer_states=bf16{}", also),
          .activations = fmt::format("dataset.token_micro_batch_size below {} (with more grad_acc_steps), or "
                                     "recompute_layers up to {}",
                                     config.dataset.token_micro_batch_size, config.model.num_hidden_layers),
          .scratch = fmt::format("{}a smaller dataset.max_seq_length or num_threads",
                                 keeps ? "fp8_config.fp8_recipe_kwargs.keep_weights=false, " : ""),
          .batches = "a smaller dataset.token_micro_batch_size, grad_acc_steps or dataset.num_workers",
          .threads = "a smaller num_threads"};
}

// What a model and its optimiser take from the memory of their device, the driver's share on a GPU included.
std::vector<MemoryRow> device_memory_rows(const ModelConfig& model, const ModelLimits& limits,
                                          const OptimizerOptions& optimizer, const MemoryRemedies& remedies) {
  const ModelMemory planned = plan_model_memory(model, limits);
  const OptimizerMemory states = Optimizer::plan_memory(ParameterList(model, limits.place), optimizer);
  const bool wide_states = limits.device != Device::kCpu && optimizer.states == OptimizerStates::kFp32;
  std::vector<MemoryRow> rows{{"weights", planned.weights, remedies.model},
                              {"gradients", planned.gradients, remedies.model},
                              {"optimiser moments", states.moments + states.exchange + states.due,
                               wide_states ? remedies.states : remedies.model},
                              {"activations", planned.saved_activations, remedies.activations},
                              {"scratch and tables", planned.workspace, remedies.scratch}};
  if (limits.device == Device::kCpu) return rows;
  if (states.masters > 0) {
    rows.push_back({optimizer.store_param_remainders ? "remainders of masters" : "fp32 masters",
                    states.masters, remedies.masters});
  }
  rows.push_back({"workspace of products", cuda::kProductWorkspaceBytes, ""});
  rows.push_back({"driver and kernels", kGpuContextBytes, ""});
  if (const uint64_t bytes = nccl_bytes(limits.place.size); bytes > 0)
    rows.push_back({"messages between GPUs", bytes, ""});
  return rows;
}

// What the model and the optimiser take, on their device; and on the host where that is a GPU, the driver.
RunMemory device_memory(const ModelConfig& model, const ModelLimits& limits,
                        const OptimizerOptions& optimizer, const MemoryRemedies& remedies) {
  const auto rows = device_memory_rows(model, limits, optimizer, remedies);
  if (limits.device == Device::kCpu) return {.rows = rows};
  return {.rows = {{"driver on the host", kGpuHostBytes, ""}}, .gpu_rows = rows};
}

// What every rank has.
void add_process_rows(const MeshSize& mesh, int64_t threads, const MemoryRemedies& remedies,
                      RunMemory& memory) {
  memory.rows.push_back({"messages between ranks", message_bytes(mesh), ""});
  memory.rows.push_back({"program and threads",
                         kResidentAtStart + kProgramBytes + static_cast<uint64_t>(threads) * kThreadBytes,
                         remedies.threads});
}

}  // namespace

uint64_t RunMemory::total() const {
  return total_bytes(rows);
}

uint64_t RunMemory::gpu_total() const {
  return total_bytes(gpu_rows);
}

Device planned_device(DeviceChoice choice) {
  return choice == DeviceChoice::kCuda ? Device::kCuda : resolved_device(choice);
}

RunMemory plan_run_memory(const RunConfig& config, const Dataset* dataset) {
  refuse_absurd_sizes(config.model, config.dataset.token_micro_batch_size, config.grad_acc_steps,
                      kSizesOfConfig);
  const ParameterList parameters(config.model, planned_place(config));
  const Device device = planned_device(config.device);
  const ModelLimits limits = planned_limits(config, true, device);
  const MemoryRemedies remedies = config_remedies(config, limits);
  const DataConfig& data = config.dataset;
  const bool staged = config.checkpoint.async_save && config.checkpoint.save_every_n_steps > 0 &&
                      planned_place(config).size.world() == 1;
  const WindowIndex elsewhere = dataset ? WindowIndex() : one_window(data);
  const uint64_t batches =
      Loader::planned_bytes(train_loader_options(data), dataset ? dataset->train->windows : elsewhere) +
      static_cast<uint64_t>(config.grad_acc_steps) * Batch::planned_bytes(data.token_micro_batch_size);
  uint64_t validation = 0;
  if (dataset && dataset->validation) {
    validation = validation_bytes(data, dataset->validation->windows);
  } else if (!dataset && (data.validation_fraction > 0 || !data.validation_path.empty())) {
    validation = validation_bytes(data, elsewhere);
  }
  RunMemory memory = device_memory(config.model, limits, optimizer_options(config, device), remedies);
  if (device != Device::kCpu) {
    memory.rows.push_back(
        {"model on the host", ModelImage::planned_bytes(parameters, device, true), remedies.model});
  }
  memory.rows.insert(
      memory.rows.end(),
      {{"checkpoint copy", staged ? staging_bytes(parameters) : 0, "checkpoint.async_save=false"},
       {"sequences", dataset ? dataset_bytes(*dataset) : 0, "fewer sequences in dataset.path"},
       {"batches", batches, remedies.batches},
       {"validation", validation, "fewer records held out"}});
  const int64_t threads = resolved_threads(config.num_threads) + data.num_workers + (staged ? 1 : 0);
  add_process_rows(planned_place(config).size, threads, remedies, memory);
  return memory;
}

RunMemory plan_step_memory(const ModelConfig& model, const ModelLimits& limits,
                           const OptimizerOptions& optimizer, const MemoryRemedies& remedies) {
  refuse_absurd_sizes(model, limits.max_tokens, limits.micro_batches, remedies.sizes);
  RunMemory memory = device_memory(model, limits, optimizer, remedies);
  const auto batches = static_cast<uint64_t>(limits.micro_batches);
  memory.rows.push_back({"batches", batches * Batch::planned_bytes(limits.max_tokens), remedies.batches});
  add_process_rows(limits.place.size, limits.num_threads, remedies, memory);
  return memory;
}

FitLine fit_line(const std::vector<MemoryRow>& rows, uint64_t bytes) {
  const uint64_t total = total_bytes(rows);
  const auto gb = [](uint64_t count) { return static_cast<double>(count) * 1e-9; };
  if (total <= bytes) return {true, fmt::format("fits: {:.1f} GB are left", gb(bytes - total))};
  const MemoryRow& largest = *std::max_element(
      rows.begin(), rows.end(), [](const MemoryRow& a, const MemoryRow& b) { return a.bytes < b.bytes; });
  return {false, fmt::format("does not fit: {:.1f} GB too many; most are {} ({:.1f} GB): choose {}",
                             gb(total - bytes), largest.name, gb(largest.bytes),
                             largest.remedy.empty() ? "a smaller run" : largest.remedy)};
}

namespace {

void require_rows(const std::vector<MemoryRow>& rows, const char* where, uint64_t held, uint64_t available) {
  const uint64_t total = total_bytes(rows);
  if (total - std::min(total, held) <= available) return;
  std::string list;
  const MemoryRow* largest = &rows.front();
  for (const MemoryRow& row : rows) {
    if (row.bytes > 0) list += fmt::format("{}{} {}", list.empty() ? "" : ", ", row.name, row.bytes);
    if (row.bytes > largest->bytes) largest = &row;
  }
  throw user_error("the run needs {} bytes of {} and {} are there ({}); most are {}: choose {}", total, where,
                   available + std::min(total, held), list, largest->name,
                   largest->remedy.empty() ? "a smaller run" : largest->remedy);
}

}  // namespace

void require_memory(const RunMemory& memory, uint64_t held, uint64_t available) {
  require_rows(memory.rows, "memory", held, available);
}

void require_memory_here(const RunMemory& memory, int64_t ranks_on_host) {
  require_memory(memory, resident_memory(), available_memory() / static_cast<uint64_t>(ranks_on_host));
  if (!memory.gpu_rows.empty()) {
    require_rows(memory.gpu_rows, "GPU memory", 0, device_info(Device::kCuda).free_bytes);
  }
}

}  // namespace biomoe
