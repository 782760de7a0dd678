#include "biomoe/train/step_time.h"

#include <algorithm>

#include "biomoe/core/clock.h"
#include "biomoe/model/model_layout.h"
#include "biomoe/model/parameters.h"
#include "biomoe/ops/gemm.h"
#include "biomoe/train/memory_plan.h"
#include "biomoe/train/train_step.h"
#include "biomoe/train/trainer.h"

namespace biomoe {
namespace {

// Of one sequence of `length` tokens: what the tokens cost by themselves, and their attention.
double sequence_flops(const ModelConfig& model, int64_t length) {
  const ParameterList parameters(model);
  Batch one_token, no_token;
  one_token.tokens = {0};
  no_token.cu_seqlens = {0, static_cast<int32_t>(length)};
  return static_cast<double>(length) * step_flops(model, parameters, one_token) +
         step_flops(model, parameters, no_token);
}

double measure_product(int64_t rows, int64_t columns, int64_t inner, int num_threads, double seconds) {
  const auto bytes = [](int64_t a, int64_t b) {
    return align_up(static_cast<size_t>(a * b) * sizeof(float));
  };
  Arena arena(bytes(rows, inner) + bytes(columns, inner) + bytes(rows, columns), "the measured product");
  Context ctx{.device = Device::kCpu, .num_threads = num_threads};
  GemmArgs args{.a = arena.tensor(DType::kF32, {rows, inner}),
                .b = arena.tensor(DType::kF32, {columns, inner}),
                .c = arena.tensor(DType::kF32, {rows, columns}),
                .transpose_b = true};
  std::fill_n(args.a.f32(), rows * inner, 1.0f);
  std::fill_n(args.b.f32(), columns * inner, 1.0f);
  const double flops = 2.0 * static_cast<double>(rows) * static_cast<double>(columns * inner);
  double best = 0;
  const double end = now_seconds() + seconds;
  for (double begin = now_seconds(); begin < end;) {
    gemm(ctx, args);
    const double after = now_seconds();
    best = std::max(best, flops / std::max(1e-9, after - begin));
    begin = after;
  }
  return best;
}

double step_of_rank_flops(const RunConfig& config) {
  const DataConfig& data = config.dataset;
  return sequence_flops(config.model, data.max_seq_length) *
         static_cast<double>(data.token_micro_batch_size * config.grad_acc_steps) /
         static_cast<double>(data.max_seq_length);
}

// Seconds in which a group of `ranks`, neighbours in the mesh or `apart` of each other, reduces and scatters,
// or gathers, `bytes` that each of them holds.
double collective_seconds(double bytes, int64_t ranks, int64_t apart, const LinkRates& rates) {
  if (ranks == 1) return 0;
  const double rate = ranks * apart <= rates.gpus_of_host ? rates.collective : rates.between_hosts;
  return bytes * static_cast<double>(ranks - 1) / static_cast<double>(ranks) / rate;
}

}  // namespace

double communication_seconds(const RunConfig& config, const MeshSize& mesh, const LinkRates& rates) {
  const ModelConfig& model = config.model;
  const ParameterList parameters(model, {.size = mesh});
  const bool several = config.grad_acc_steps > 1;
  double gradient = several ? 4 : 2, weight = 2;
  if (config.parallelism.shard_parameters) {
    // Weights come for each pass, the first of which may be of the routers alone; gradients go after each.
    const auto passes = static_cast<double>(config.grad_acc_steps);
    gradient *= passes;
    weight *= (several ? 3 : 2) * passes;
  }
  double replicas = 0;  // gradients reduced, weights gathered
  for (const ArenaRegion& region : parameters.regions()) {
    const auto count = static_cast<double>(region.count);
    const int64_t apart = region.experts ? mesh.ep : 1;
    replicas += collective_seconds(count * (gradient + weight), region.copies, apart, rates);
  }
  double rows = 0;
  if (mesh.ep > 1) {
    // Forward sends and fetches a row a slot; backward sends two and fetches one. A recomputed layer sends
    // and fetches once more.
    const auto moves = static_cast<double>(5 * model.num_hidden_layers +
                                           2 * std::min(config.recompute_layers, model.num_hidden_layers));
    const double bytes = static_cast<double>(config.dataset.token_micro_batch_size *
                                             model.num_experts_per_tok * model.hidden_size) *
                         2.0 * static_cast<double>(mesh.ep - 1) / static_cast<double>(mesh.ep);
    const double rate = mesh.ep <= rates.gpus_of_host ? rates.rows : rates.between_hosts;
    rows = moves * static_cast<double>(config.grad_acc_steps) * bytes / rate;
  }
  return rows + replicas;
}

StepTime estimate_gpu_step_time(const RunConfig& config, int64_t dp_size) {
  // Of products of E4M3 codes with what quantises their rows; the gain of whole steps is less than theirs.
  constexpr double kCodesFlopsPerSecond = 840e12;
  constexpr double kFlopsPerSecond = 630e12, kBytesPerSecond = 4.2e12;
  const MeshSize mesh{.dp = dp_size, .ep = config.parallelism.ep_size};
  ModelLimits limits = planned_limits(config, true, Device::kCuda);
  limits.place.size = mesh;
  const QuantizedWeights quantized = quantized_weights(config.model, fp8_shape(config.model, limits));
  const double fp32 = config.optimizer_store_param_remainders ? 26 : 28;
  const double bytes = config.optimizer_states == OptimizerStates::kBf16 ? 14 : fp32;  // a parameter
  StepTime time;
  time.flops = step_of_rank_flops(config);
  // What a recomputed layer does in forward it does twice: a third of its operations more.
  const double recomputed =
      static_cast<double>(std::min(config.recompute_layers, config.model.num_hidden_layers)) /
      static_cast<double>(config.model.num_hidden_layers);
  const double tokens = static_cast<double>(config.dataset.token_micro_batch_size * config.grad_acc_steps);
  const double of_codes = 6.0 * static_cast<double>(quantized.native_active) * tokens;
  const double products = of_codes / kCodesFlopsPerSecond + (time.flops - of_codes) / kFlopsPerSecond;
  time.flops_per_second = time.flops / (products * (1 + recomputed / 3));
  const ParameterList parameters(config.model, {.size = mesh});
  // Codes of weights for both directions: AdamW writes them with weights that it updates whole, others are
  // read for them; where ranks shard them, in each pass of each micro-batch. Emulated, weights are read and
  // written in each direction of each micro-batch.
  const bool sharded = config.parallelism.shard_parameters && mesh.dp > 1;
  const double a_weight = sharded ? 8.0 * static_cast<double>(config.grad_acc_steps) : mesh.dp == 1 ? 2 : 4;
  const double codes = static_cast<double>(quantized.native + quantized.kept) * a_weight;
  time.update_seconds = (static_cast<double>(parameters.owned_elements()) * bytes + codes) / kBytesPerSecond;
  time.quantize_seconds =
      static_cast<double>(quantized.emulated * config.grad_acc_steps) * 8 / kBytesPerSecond;
  time.communication_seconds = communication_seconds(config, mesh);
  time.basis = fmt::format("an H200's grouped products{}, and AdamW at its memory's rate",
                           quantized.native > 0 ? ", of E4M3 codes and of BF16" : "");
  if (mesh.world() > 1) {
    const LinkRates rates;
    time.basis += fmt::format(", {:.0f} GB/s between GPUs of a host", rates.rows * 1e-9);
    if (mesh.world() > rates.gpus_of_host)
      time.basis += fmt::format(" and {:.0f} GB/s from host to host", rates.between_hosts * 1e-9);
  }
  time.basis += " (stated, not measured here)";
  return time;
}

StepTime estimate_step_time(const RunConfig& config, double measure_seconds) {
  const ModelConfig& model = config.model;
  const MeshSize mesh = planned_place(config).size;
  if (planned_device(config.device) == Device::kCuda) return estimate_gpu_step_time(config, mesh.dp);
  StepTime time;
  time.num_threads = resolved_threads(config.num_threads);
  time.flops = step_of_rank_flops(config);
  time.basis =
      fmt::format("this machine's matrix products with {} threads (measured now){}", time.num_threads,
                  mesh.world() == 1 ? "" : "; the time between ranks is not counted");
  // A product of these sides takes milliseconds; larger ones run at the same rate.
  constexpr int64_t kLargest = 1024;
  const int64_t rows =
      config.dataset.token_micro_batch_size * model.num_experts_per_tok / model.num_local_experts;
  time.flops_per_second =
      measure_product(std::clamp<int64_t>(rows, 1, kLargest), std::min(2 * model.intermediate_size, kLargest),
                      std::min(model.hidden_size, kLargest), time.num_threads, measure_seconds);
  return time;
}

}  // namespace biomoe
