#include <algorithm>
#include <nlohmann/json.hpp>

#include "apps/commands.h"
#include "biomoe/core/file.h"
#include "biomoe/core/rng.h"
#include "biomoe/core/version.h"
#include "biomoe/train/trainer.h"

namespace biomoe::apps {
namespace {

struct BenchOptions {
  ModelConfig model;
  int64_t seq = 512, batch = 4, steps = 10, warmup = 3, num_threads = 0;
  std::string json, mode = "grouped_linear";
};

Batch random_batch(const BenchOptions& options) {
  Batch batch;
  const Rng rng(1, RngStream::kTest);
  for (int64_t b = 0; b < options.batch; ++b) {
    for (int64_t s = 0; s < options.seq; ++s) {
      const auto counter = static_cast<uint64_t>(batch.num_tokens());
      batch.tokens.push_back(
          static_cast<int32_t>(rng.u64(counter) % static_cast<uint64_t>(options.model.vocab_size)));
      batch.positions.push_back(static_cast<int32_t>(s));
    }
    batch.cu_seqlens.push_back(static_cast<int32_t>(batch.num_tokens()));
  }
  for (size_t t = 0; t < batch.tokens.size(); ++t) {
    const bool last = batch.positions[t] + 1 == options.seq;
    batch.targets.push_back(last ? kIgnoreTarget : batch.tokens[t + 1]);
    batch.loss_weights.push_back(last ? 0.0f : 1.0f);
    batch.valid_targets += last ? 0 : 1;
  }
  batch.target_weight = static_cast<double>(batch.valid_targets);
  return batch;
}

ExpertFfnMode parse_mode(const std::string& name) {
  for (size_t i = 0; i < kExpertFfnModeNames.size(); ++i) {
    if (kExpertFfnModeNames[i] == name) return static_cast<ExpertFfnMode>(i);
  }
  throw user_error("--expert-ffn-mode {}: choose loop or grouped_linear", name);
}

// Whole steps (forward, loss, backward, norm, clipping, AdamW) on random tokens.
nlohmann::json bench_step(const BenchOptions& options) {
  options.model.validate();
  const Batch batch = random_batch(options);
  Model model(options.model, {.max_tokens = batch.num_tokens(),
                              .max_seqlen = options.seq,
                              .num_threads = resolved_threads(options.num_threads),
                              .training = true,
                              .recompute_layers = 0,
                              .expert_ffn_mode = parse_mode(options.mode)});
  model.initialize(0);
  Optimizer optimizer(model.parameters(), {});
  std::vector<double> seconds;
  double loss = 0;
  for (int64_t step = 0; step < options.warmup + options.steps; ++step) {
    const double begin = now_seconds();
    loss = train_step(model, optimizer, {&batch, 1}, {.step = step, .lr = 1e-5, .max_grad_norm = 1.0}).loss;
    if (step >= options.warmup) seconds.push_back(now_seconds() - begin);
  }
  std::sort(seconds.begin(), seconds.end());
  const double median = seconds[seconds.size() / 2];
  const double flops = step_flops(options.model, model.parameters(), batch);
  return {{"what", "step"},
          {"version", kVersion},
          {"device", "cpu"},
          {"threads", model.limits().num_threads},
          {"expert_ffn_mode", options.mode},
          {"layers", options.model.num_hidden_layers},
          {"hidden", options.model.hidden_size},
          {"ffn", options.model.intermediate_size},
          {"experts", options.model.num_local_experts},
          {"top_k", options.model.num_experts_per_tok},
          {"vocab", options.model.vocab_size},
          {"seq", options.seq},
          {"batch", options.batch},
          {"step_ms", median * 1e3},
          {"min_ms", seconds.front() * 1e3},
          {"max_ms", seconds.back() * 1e3},
          {"tokens_per_s", static_cast<double>(batch.num_tokens()) / median},
          {"gflops", flops / median * 1e-9},
          {"loss", loss}};
}

void report(const BenchOptions& options, const nlohmann::json& result) {
  fmt::print("{}\n", result.dump(1));
  if (!options.json.empty()) replace_file(options.json, result.dump(1) + "\n");
}

void check(const BenchOptions& options) {
  if (options.seq < 2 || options.batch < 1 || options.steps < 1 || options.warmup < 0 ||
      options.seq > (int64_t{1} << 31) / options.batch) {
    throw user_error(
        "bench: --seq of at least 2, --batch and --steps of at least 1, fewer than 2^31 tokens in all");
  }
}

}  // namespace

void add_bench(CLI::App& app) {
  CLI::App* command = app.add_subcommand("bench", "how fast this machine runs it");
  command->require_subcommand(1);
  auto options = std::make_shared<BenchOptions>();
  options->model.vocab_size = 16;
  CLI::App* step = command->add_subcommand("step", "whole training steps");
  CLI::App* moe = command->add_subcommand("moe", "whole steps with each expert_ffn_mode, side by side");
  for (CLI::App* sub : {step, moe}) {
    sub->add_option("--layers", options->model.num_hidden_layers, "layers");
    sub->add_option("--hidden", options->model.hidden_size, "model width");
    sub->add_option("--ffn", options->model.intermediate_size, "expert width");
    sub->add_option("--num-experts", options->model.num_local_experts, "experts");
    sub->add_option("--top-k", options->model.num_experts_per_tok, "experts a token");
    sub->add_option("--heads", options->model.num_attention_heads, "query heads");
    sub->add_option("--kv-heads", options->model.num_key_value_heads, "key/value heads");
    sub->add_option("--vocab", options->model.vocab_size, "vocabulary");
    sub->add_option("--seq", options->seq, "tokens of a sequence");
    sub->add_option("--batch", options->batch, "sequences");
    sub->add_option("--steps", options->steps, "steps timed");
    sub->add_option("--warmup", options->warmup, "steps before");
    sub->add_option("--threads", options->num_threads, "CPU threads; default: all");
    sub->add_option("--json", options->json, "write the figures to this file");
  }
  step->add_option("--expert-ffn-mode", options->mode, "loop or grouped_linear");
  step->callback([options] {
    check(*options);
    report(*options, bench_step(*options));
  });
  moe->callback([options] {
    check(*options);
    nlohmann::json rows = nlohmann::json::array();
    for (const auto name : kExpertFfnModeNames) {
      options->mode = name;
      rows.push_back(bench_step(*options));
    }
    report(*options, rows);
  });
}

}  // namespace biomoe::apps
