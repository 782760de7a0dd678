#include <algorithm>
#include <cmath>
#include <optional>

#include "apps/bench.h"
#include "biomoe/core/clock.h"
#include "biomoe/model/parameter_io.h"
#include "biomoe/ops/comm_clock.h"
#include "biomoe/ops/device_peak.h"
#include "biomoe/train/memory_plan.h"
#include "biomoe/train/trainer.h"

namespace biomoe::apps {
namespace {

void set_weights(Model& model, Optimizer& optimizer) {
  const ParameterList& parameters = model.parameters();
  if (model.limits().device == Device::kCpu && !parameters.shards()) {
    model.initialize(0);
    return;
  }
  ParameterIo io(model.context(), model.types());
  // Remainders stay 0: the weights are the masters.
  std::vector<TensorView> arenas{model.weights_A()};
  if (optimizer.master_A()) arenas.push_back(optimizer.master_A());
  for (size_t i = 0; i < arenas.size(); ++i) {
    fill_random(model.context(), arenas[i], model.config().initializer_range);
    for (const auto& spec : parameters.specs()) {
      if (spec.kind != ParamKind::kNorm) continue;
      const std::vector<float> ones(static_cast<size_t>(spec.num_elements()), 1.0f);
      const bool whole = i == 0 && !parameters.shards();
      io.write_state_sync(
          spec, ones.data(),
          whole ? whole_arena(spec, arenas[i]) : StateArena{arenas[i], parameters.state_owners(spec)});
    }
  }
  model.weights_changed();
}

// What column 0 of a parameter is set to for skewed routing: all tokens share a component of the residual
// stream, large beside the others, that nothing looks at but the router's row of expert 0, whose logit it
// lifts. The other logits differ by token as before.
std::optional<float> shared_column(const ParamSpec& spec, int64_t row, int64_t width) {
  constexpr float kShared = 30.0f, kLogit = 16.0f;
  switch (spec.kind) {
    case ParamKind::kEmbedding:
      return kShared;
    case ParamKind::kRouter:  // a norm makes the component about the root of the width
      return row == 0 ? kLogit / std::sqrt(static_cast<float>(width)) : 0.0f;
    case ParamKind::kAttention:
      if (spec.name.ends_with("o_proj.weight")) return std::nullopt;
      return 0.0f;
    case ParamKind::kExpert:
      if (spec.name.ends_with("down_proj")) return std::nullopt;
      return 0.0f;
    default:
      return std::nullopt;
  }
}

void skew_routing(Model& model, Optimizer& optimizer) {
  const int64_t width = model.config().hidden_size;
  ParameterIo io(model.context(), model.types());
  std::vector<float> values;
  for (const auto& spec : model.parameters().specs()) {
    if (!shared_column(spec, 0, width)) continue;
    values.resize(static_cast<size_t>(spec.num_elements()));
    io.read_sync(spec, model.weights_A(), values.data());
    for (int64_t row = 0; row < spec.num_elements() / width; ++row) {
      values[static_cast<size_t>(row * width)] = *shared_column(spec, row, width);
    }
    io.write_sync(spec, values.data(), model.weights_A());
    if (optimizer.master_A())
      io.write_state_sync(spec, values.data(), {optimizer.master_A(), model.parameters().state_owners(spec)});
  }
  model.weights_changed();
}

// Milliseconds of a step in which operations wait for communication: the median of a few that are not
// recorded.
double communication_of_step(Model& model, Optimizer& optimizer, const Mesh& mesh, const Batch& batch) {
  constexpr int64_t kSteps = 5;
  StepRunner runner(model, optimizer, false, &mesh);
  CommClock clock;
  std::vector<double> totals;
  for (int64_t step = 0; step < kSteps; ++step) {
    model.context().comm_clock = &clock;
    runner.submit({&batch, 1}, {.step = step, .lr = 1e-5, .max_grad_norm = 1.0});
    model.context().comm_clock = nullptr;
    runner.finish_sync();
    totals.push_back(clock.total_ms_sync());
  }
  return median_of(totals);
}

// Share of the rows that the expert with the most gets, of the layer where that is the least.
double least_largest_share(const RoutingStats& routing, int64_t top_k) {
  const int64_t layers = routing.counts_LE.shape[0], experts = routing.counts_LE.shape[1];
  double least = 1.0;
  for (int64_t layer = 0; layer < layers; ++layer) {
    const int64_t* counts = routing.counts_LE.i64() + layer * experts;
    least = std::min(least, static_cast<double>(*std::max_element(counts, counts + experts)) /
                                static_cast<double>(routing.tokens * top_k));
  }
  return least;
}

// Null where experts are not split.
nlohmann::json dispatcher_name(const ModelLimits& limits) {
  if (limits.place.size.ep == 1) return nullptr;
  if (limits.device == Device::kCpu) return "mpi";
  return limits.expert_messages ? "nccl" : "p2p";
}

}  // namespace

nlohmann::json bench_step(const BenchOptions& options, const Ranks& ranks) {
  options.model.validate();
  const Mesh& mesh = ranks.mesh;
  const RunConfig config = run_config(options);
  require_supported(config, options.device);
  if (options.shard_parameters && !mesh.alone() && options.routing == Routing::kSkewed) {
    throw user_error("--routing skewed sets whole weights, which no rank has with --shard-parameters true");
  }
  ModelLimits limits = planned_limits(config, true, options.device);
  join_ranks(mesh, options.dispatcher, limits);
  OptimizerOptions states = optimizer_options(config, options.device);
  if (!mesh.alone()) states.world = &mesh.world();
  const RunMemory memory = plan_step_memory(options.model, limits, states, bench_remedies());
  require_memory_here(memory, ranks.on_host);
  const Batch batch = random_batch(options, mesh.rank());
  Model model(options.model, limits);
  Optimizer optimizer(model.parameters(), {}, states);
  set_weights(model, optimizer);
  if (options.routing == Routing::kSkewed) skew_routing(model, optimizer);
  StepRunner runner(model, optimizer, options.cuda_graph && can_record_steps(limits), &mesh);
  std::vector<double> seconds;
  double loss = 0;
  for (int64_t step = 0; step < options.warmup + options.steps; ++step) {
    const double begin = now_seconds();
    runner.submit({&batch, 1}, {.step = step, .lr = 1e-5, .max_grad_norm = 1.0});
    loss = runner.finish_sync().loss;
    if (step >= options.warmup) seconds.push_back(now_seconds() - begin);
  }
  runner.settle();  // a timed step made the update of the one before it
  double communication_ms = 0;
  if (!mesh.alone()) communication_ms = communication_of_step(model, optimizer, mesh, batch);
  const double median = median_of(seconds);
  const auto [fastest, slowest] = std::minmax_element(seconds.begin(), seconds.end());
  const double flops = step_flops(options.model, model.parameters(), batch);
  nlohmann::json result = bench_header(options, "step");
  result.update(
      {{"expert_ffn_mode", kExpertFfnModeNames[static_cast<size_t>(options.mode)]},
       {"optimizer_states", kOptimizerStatesNames[static_cast<size_t>(options.states)]},
       {"optimizer_store_param_remainders", options.param_remainders},
       {"portable_kernels", options.portable_kernels},
       {"fp8", model.fp8_state().describe()},
       {"routing", kRoutingNames[static_cast<size_t>(options.routing)]},
       {"largest_expert_share", least_largest_share(model.routing(), options.model.num_experts_per_tok)},
       {"cuda_graph", options.cuda_graph},
       {"deterministic", options.deterministic},
       {"parameters", model.parameters().num_parameters()},
       {"step_ms", median * 1e3},
       {"min_ms", *fastest * 1e3},
       {"max_ms", *slowest * 1e3},
       {"ranks", mesh.size()},
       {"dp", mesh.place().size.dp},
       {"ep", mesh.place().size.ep},
       {"dispatcher", dispatcher_name(limits)},
       {"shard_parameters", options.shard_parameters},
       {"communication_ms", communication_ms},
       {"tokens_per_s_per_rank", static_cast<double>(batch.num_tokens()) / median},
       {"tokens_per_s", static_cast<double>(batch.num_tokens() * mesh.size()) / median},
       {"gflops", flops / median * 1e-9},
       {"mfu", nullptr},
       {"memory_planned_bytes", memory.total()},
       {"loss", loss}});
  if (options.device == Device::kCpu) return result;
  const DeviceInfo info = device_info(options.device);
  if (const auto peak = peak_bf16_flops(info.name)) result["mfu"] = flops / median / *peak;
  result["device_memory_used_bytes"] = info.used_bytes();
  result["device_memory_planned_bytes"] = memory.gpu_total();
  return result;
}

}  // namespace biomoe::apps
