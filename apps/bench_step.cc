#include <algorithm>

#include "apps/bench.h"
#include "biomoe/train/trainer.h"

namespace biomoe::apps {

nlohmann::json bench_step(const BenchOptions& options) {
  options.model.validate();
  const Batch batch = random_batch(options);
  Model model(options.model, {.max_tokens = batch.num_tokens(),
                              .max_seqlen = options.seq,
                              .num_threads = resolved_threads(options.num_threads),
                              .training = true,
                              .recompute_layers = 0,
                              .expert_ffn_mode = options.mode});
  model.initialize(0);
  Optimizer optimizer(model.parameters(), {});
  std::vector<double> seconds;
  double loss = 0;
  for (int64_t step = 0; step < options.warmup + options.steps; ++step) {
    const double begin = now_seconds();
    loss = train_step(model, optimizer, {&batch, 1}, {.step = step, .lr = 1e-5, .max_grad_norm = 1.0}).loss;
    if (step >= options.warmup) seconds.push_back(now_seconds() - begin);
  }
  const double median = median_of(seconds);
  const auto [fastest, slowest] = std::minmax_element(seconds.begin(), seconds.end());
  nlohmann::json result = bench_header(options, "step");
  result.update({{"expert_ffn_mode", kExpertFfnModeNames[static_cast<size_t>(options.mode)]},
                 {"step_ms", median * 1e3},
                 {"min_ms", *fastest * 1e3},
                 {"max_ms", *slowest * 1e3},
                 {"tokens_per_s", static_cast<double>(batch.num_tokens()) / median},
                 {"gflops", step_flops(options.model, model.parameters(), batch) / median * 1e-9},
                 {"loss", loss}});
  return result;
}

}  // namespace biomoe::apps
