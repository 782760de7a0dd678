#include <algorithm>

#include "apps/bench.h"
#include "biomoe/core/clock.h"
#include "biomoe/core/rng.h"
#include "biomoe/model/parameter_io.h"
#include "biomoe/train/trainer.h"

namespace biomoe::apps {
namespace {

// Repeats a block of random numbers over a device's arena: billions of weights in seconds.
void fill_random(Context& ctx, const TensorView& arena_A, double scale) {
  constexpr int64_t kBlock = int64_t{1} << 22;
  const size_t element = dtype_size(arena_A.dtype);
  const int64_t count = std::min(kBlock, arena_A.num_elements());
  std::vector<uint16_t> bits(static_cast<size_t>(count));
  std::vector<float> values(static_cast<size_t>(count));
  const Rng rng(0, RngStream::kTest);
  for (int64_t i = 0; i < count; ++i) {
    values[static_cast<size_t>(i)] = static_cast<float>(scale * rng.normal(static_cast<uint64_t>(i)));
    bits[static_cast<size_t>(i)] = bf16_from_float(values[static_cast<size_t>(i)]);
  }
  const void* source = arena_A.dtype == DType::kBF16 ? static_cast<const void*>(bits.data()) : values.data();
  for (int64_t begin = 0; begin < arena_A.num_elements(); begin += count) {
    const auto bytes = static_cast<size_t>(std::min(count, arena_A.num_elements() - begin)) * element;
    copy_to_device(ctx, static_cast<uint8_t*>(arena_A.data) + static_cast<size_t>(begin) * element, source,
                   bytes);
  }
  device_wait_sync(ctx);
}

void set_weights(Model& model, Optimizer& optimizer) {
  if (model.limits().device == Device::kCpu) {
    model.initialize(0);
    return;
  }
  ParameterIo io(model.context(), model.types());
  std::vector<TensorView> arenas{model.weights_A()};
  if (optimizer.master_A()) arenas.push_back(optimizer.master_A());
  for (const TensorView& arena_A : arenas) {
    fill_random(model.context(), arena_A, model.config().initializer_range);
    for (const auto& spec : model.parameters().specs()) {
      if (spec.kind != ParamKind::kNorm) continue;
      io.write_sync(spec, std::vector<float>(static_cast<size_t>(spec.num_elements()), 1.0f).data(), arena_A);
    }
  }
}

}  // namespace

nlohmann::json bench_step(const BenchOptions& options) {
  options.model.validate();
  const Batch batch = random_batch(options);
  Model model(options.model, {.max_tokens = batch.num_tokens(),
                              .max_seqlen = options.seq,
                              .num_threads = resolved_threads(options.num_threads),
                              .training = true,
                              .recompute_layers = 0,
                              .expert_ffn_mode = options.mode,
                              .device = options.device,
                              .deterministic = options.deterministic});
  Optimizer optimizer(model.parameters(), {}, {.device = options.device, .states = options.states});
  set_weights(model, optimizer);
  StepRunner runner(model, optimizer, options.cuda_graph && options.mode != ExpertFfnMode::kLoop);
  std::vector<double> seconds;
  double loss = 0;
  for (int64_t step = 0; step < options.warmup + options.steps; ++step) {
    const double begin = now_seconds();
    runner.submit({&batch, 1}, {.step = step, .lr = 1e-5, .max_grad_norm = 1.0});
    loss = runner.finish_sync().loss;
    if (step >= options.warmup) seconds.push_back(now_seconds() - begin);
  }
  const double median = median_of(seconds);
  const auto [fastest, slowest] = std::minmax_element(seconds.begin(), seconds.end());
  const double flops = step_flops(options.model, model.parameters(), batch);
  nlohmann::json result = bench_header(options, "step");
  result.update({{"expert_ffn_mode", kExpertFfnModeNames[static_cast<size_t>(options.mode)]},
                 {"optimizer_states", kOptimizerStatesNames[static_cast<size_t>(options.states)]},
                 {"cuda_graph", options.cuda_graph},
                 {"deterministic", options.deterministic},
                 {"parameters", model.parameters().num_parameters()},
                 {"step_ms", median * 1e3},
                 {"min_ms", *fastest * 1e3},
                 {"max_ms", *slowest * 1e3},
                 {"tokens_per_s", static_cast<double>(batch.num_tokens()) / median},
                 {"gflops", flops / median * 1e-9},
                 {"loss", loss}});
  return result;
}

}  // namespace biomoe::apps
