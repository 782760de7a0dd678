#include <algorithm>
#include <nlohmann/json.hpp>

#include "apps/commands.h"
#include "apps/config_options.h"
#include "biomoe/core/file.h"
#include "biomoe/core/system_memory.h"
#include "biomoe/core/version.h"
#include "biomoe/model/model_layout.h"
#include "biomoe/train/memory_plan.h"
#include "biomoe/train/progress.h"
#include "biomoe/train/run_match.h"
#include "biomoe/train/step_time.h"
#include "biomoe/train/trainer.h"

namespace biomoe::apps {
namespace {

// Memory of cards in use (A100 and H100; H200; B200), in 10^9 bytes.
constexpr uint64_t kCards[] = {80, 141, 192};
// GPUs that a run over ranks is also planned for.
constexpr int64_t kWorlds[] = {8, 64, 1024};

void print_plan(const nlohmann::ordered_json& plan, const RunMemory& memory,
                const std::string& missing_data) {
  const auto& mesh = plan["mesh"];
  const auto dp = mesh["dp"].get<int64_t>(), ep = mesh["ep"].get<int64_t>();
  if (dp * ep > 1) fmt::print("{} ranks (dp {} x ep {}); the bytes are of one rank\n", dp * ep, dp, ep);
  const auto micro_batches = plan["micro_batches"].get<int64_t>();
  fmt::print("{} parameters, {} active a token, {} tokens a micro-batch, {} micro-batch{} a step\n",
             plan["parameters"].get<int64_t>(), plan["active_parameters"].get<int64_t>(),
             plan["tokens_per_micro_batch"].get<int64_t>(), micro_batches, micro_batches == 1 ? "" : "es");
  for (const MemoryRow& row : memory.rows) fmt::print("{:<24} {:>16} bytes\n", row.name, row.bytes);
  fmt::print("{:<24} {:>16} bytes{} ({})\n", "total", memory.total(),
             memory.gpu_rows.empty() ? "" : " on the host", bytes_text(static_cast<double>(memory.total())));
  if (dp * ep > 1) {
    fmt::print("{:<24} {:>16} bytes, if they are all on one ({})\n", "host of all ranks",
               memory.total() * static_cast<uint64_t>(dp * ep),
               bytes_text(static_cast<double>(memory.total()) * static_cast<double>(dp * ep)));
  }
  for (const MemoryRow& row : memory.gpu_rows) fmt::print("{:<24} {:>16} bytes\n", row.name, row.bytes);
  if (!memory.gpu_rows.empty()) {
    fmt::print("{:<24} {:>16} bytes on the GPU ({})\n", "total", memory.gpu_total(),
               bytes_text(static_cast<double>(memory.gpu_total())));
  }
  for (const auto& [card, line] : plan["cards"].items())
    fmt::print("{:<24} {}\n", card + " card", line["text"].get<std::string>());
  if (!missing_data.empty()) fmt::print("without the sequences: {}\n", missing_data);
  if (const auto fp8 = plan["fp8"].get<std::string>(); !fp8.empty()) fmt::print("{}\n", fp8);
  const auto& time = plan["step_time"];
  fmt::print("step time: at least {:.3g} s: {:.3g} FLOPs at {:.4g} GFLOP/s of {}\n",
             time["seconds"].get<double>(), time["flops"].get<double>(),
             time["gemm_flops_per_second"].get<double>() * 1e-9, time["basis"].get<std::string>());
  for (const auto& world : plan["worlds"]) {
    fmt::print(
        "{:>6} GPUs (dp {} x ep {}): {:.3g} s, of which {:.2g} s communication; {:.0f} tokens/s a GPU\n",
        world["gpus"].get<int64_t>(), world["dp"].get<int64_t>(), ep, world["seconds"].get<double>(),
        world["communication_seconds"].get<double>(), world["tokens_per_s_per_gpu"].get<double>());
  }
}

nlohmann::json step_times_of_worlds(const RunConfig& config) {
  nlohmann::json worlds = nlohmann::json::array();
  const int64_t ep = config.parallelism.ep_size;
  if (planned_place(config).size.world() == 1 || planned_device(config.device) == Device::kCpu) return worlds;
  for (const int64_t gpus : kWorlds) {
    if (gpus % ep != 0) continue;
    const StepTime time = estimate_gpu_step_time(config, gpus / ep);
    const auto tokens = static_cast<double>(config.dataset.token_micro_batch_size * config.grad_acc_steps);
    worlds.push_back({{"gpus", gpus},
                      {"dp", gpus / ep},
                      {"seconds", time.seconds()},
                      {"communication_seconds", time.communication_seconds},
                      {"tokens_per_s_per_gpu", tokens / time.seconds()}});
  }
  return worlds;
}

void run(const ConfigOptions& options, const std::string& json_path) {
  if (!json_path.empty()) require_creatable(json_path);
  const ResolvedConfig<RunConfig> resolved = options.load();
  tell_unused(resolved);
  RunConfig config = resolved.value;
  std::optional<Dataset> dataset;
  std::string missing_data;
  try {
    dataset.emplace(open_dataset(config.dataset));
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kUser) throw;
    missing_data = error.what();
  }
  if (!json_path.empty()) {
    std::vector<std::string> inputs{options.file};
    if (dataset)
      for (const FileReport& file : dataset->report.files) inputs.push_back(file.path);
    require_not_an_input(json_path, inputs);
  }
  resolve_model(
      config, dataset ? dataset->vocabulary
                      : Vocabulary::open(config.dataset.tokenizer_name_or_path, config.dataset.soft_masked));
  ParallelismConfig& mesh = config.parallelism;
  mesh.dp_size = planned_mesh(mesh.dp_size, mesh.ep_size, config.model.num_local_experts).dp;
  require_supported(config, planned_device(config.device));
  check_init_from(config);
  const RunMemory memory = plan_run_memory(config, dataset ? &*dataset : nullptr);
  const ParameterList parameters(config.model);
  const StepTime time = estimate_step_time(config);
  nlohmann::json rows = nlohmann::json::object();
  for (const MemoryRow& row : memory.rows) rows[row.name] = row.bytes;
  nlohmann::json gpu_rows = nlohmann::json::object();
  for (const MemoryRow& row : memory.gpu_rows) gpu_rows[row.name] = row.bytes;
  nlohmann::ordered_json cards = nlohmann::ordered_json::object();
  for (const uint64_t gb : kCards) {
    if (memory.gpu_rows.empty()) break;
    const FitLine line = fit_line(memory.gpu_rows, gb * 1'000'000'000);
    cards[fmt::format("{} GB", gb)] = {{"fits", line.fits}, {"text", line.text}};
  }
  const ModelLimits limits = planned_limits(config, true, planned_device(config.device));
  const nlohmann::ordered_json plan = {
      {"version", kVersion},
      {"device", memory.gpu_rows.empty() ? "cpu" : "cuda"},
      {"mesh", {{"dp", mesh.dp_size}, {"ep", mesh.ep_size}}},
      {"cards", cards},
      {"parameters", parameters.num_parameters()},
      {"active_parameters", parameters.num_active_parameters()},
      {"tokens_per_micro_batch", config.dataset.token_micro_batch_size},
      {"micro_batches", config.grad_acc_steps},
      {"sequences_counted", dataset.has_value()},
      {"bytes", rows},
      {"total_bytes", memory.total()},
      {"gpu_bytes", gpu_rows},
      {"gpu_total_bytes", memory.gpu_total()},
      {"step_time",
       {{"seconds", time.seconds()},
        {"flops", time.flops},
        {"update_seconds", time.update_seconds},
        {"quantize_seconds", time.quantize_seconds},
        {"communication_seconds", time.communication_seconds},
        {"gemm_flops_per_second", time.flops_per_second},
        {"threads", time.num_threads},
        {"basis", time.basis}}},
      {"fp8", describe_products(config.model, fp8_shape(config.model, limits))},
      {"worlds", step_times_of_worlds(config)}};
  print_plan(plan, memory, missing_data);
  if (!json_path.empty()) write_output(json_path, plan.dump(2) + "\n");
}

}  // namespace

void add_plan(CLI::App& app) {
  CLI::App* command = app.add_subcommand("plan", "memory and step time of a run, without running it");
  auto options = add_config_options(*command);
  auto json = std::make_shared<std::string>();
  command->add_option("--json", *json, "write the plan to this file");
  command->callback([options, json] { run(*options, *json); });
}

}  // namespace biomoe::apps
