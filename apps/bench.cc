#include "apps/bench.h"

#include <algorithm>

#include "apps/checked_options.h"
#include "apps/commands.h"
#include "biomoe/config/fields.h"
#include "biomoe/core/file.h"
#include "biomoe/core/rng.h"
#include "biomoe/core/version.h"
#include "biomoe/ops/device.h"

namespace biomoe::apps {

RunConfig run_config(const BenchOptions& options) {
  RunConfig config;
  config.model = options.model;
  config.expert_ffn_mode = static_cast<ExpertFfnChoice>(static_cast<int>(options.mode) + 1);
  config.device = options.device == Device::kCpu ? DeviceChoice::kCpu : DeviceChoice::kCuda;
  config.optimizer_states = options.states;
  config.optimizer_store_param_remainders = options.param_remainders;
  config.cuda_graph = options.cuda_graph;
  config.deterministic = options.deterministic;
  config.portable_kernels = options.portable_kernels;
  config.num_threads = options.num_threads;
  config.fp8_config = options.fp8;
  config.parallelism.ep_size = options.ep;
  config.parallelism.dispatcher = options.dispatcher;
  config.parallelism.shard_parameters = options.shard_parameters;
  config.parallelism.share_gpus = options.share_gpus;
  config.dataset.max_seq_length = options.seq;
  config.dataset.token_micro_batch_size = options.seq * options.batch;
  return config;
}

Batch random_batch(const BenchOptions& options, int64_t rank) {
  Batch batch;
  batch.reserve(options.seq * options.batch);
  const Rng rng(1 + static_cast<uint64_t>(rank), RngStream::kTest);
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

nlohmann::json bench_header(const BenchOptions& options, const char* what) {
  return {{"what", what},
          {"version", kVersion},
          {"device", device_info(options.device).name},
          {"driver", device_info(options.device).driver},
          {"threads", resolved_threads(options.num_threads)},
          {"layers", options.model.num_hidden_layers},
          {"hidden", options.model.hidden_size},
          {"ffn", options.model.intermediate_size},
          {"experts", options.model.num_local_experts},
          {"top_k", options.model.num_experts_per_tok},
          {"vocab", options.model.vocab_size},
          {"seq", options.seq},
          {"batch", options.batch}};
}

MemoryRemedies bench_remedies() {
  return {.sizes = "smaller sizes",
          .model = "a smaller model (--layers, --hidden, --ffn, --num-experts)",
          .states = "--optimizer-states bf16",
          .masters = "--optimizer-store-param-remainders true, or --optimizer-states bf16",
          .activations = "a smaller --batch or --seq",
          .scratch = "a smaller --seq or --threads",
          .batches = "a smaller --batch or --seq",
          .threads = "a smaller --threads"};
}

double median_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

namespace {

void write_json(const BenchOptions& options, const nlohmann::json& result) {
  if (!options.json.empty()) write_output(options.json, result.dump(1) + "\n");
}

void report(const BenchOptions& options, const nlohmann::json& result) {
  fmt::print("{}\n", result.dump(1));
  write_json(options, result);
}

void check(const BenchOptions& options) {
  if (options.seq < 2 || options.batch < 1 || options.steps < 1 || options.warmup < 0 ||
      options.seq > (int64_t{1} << 31) / options.batch) {
    throw user_error(
        "bench: --seq of at least 2, --batch and --steps of at least 1, fewer than 2^31 tokens in all");
  }
  if (!options.json.empty()) require_creatable(options.json);
}

void add_sizes(CLI::App& command, BenchOptions& options) {
  add_integer(command, "--layers", options.model.num_hidden_layers, "layers");
  add_integer(command, "--hidden", options.model.hidden_size, "model width");
  add_integer(command, "--ffn", options.model.intermediate_size, "expert width");
  add_integer(command, "--num-experts", options.model.num_local_experts, "experts");
  add_integer(command, "--top-k", options.model.num_experts_per_tok, "experts a token");
  add_integer(command, "--heads", options.model.num_attention_heads, "query heads");
  add_integer(command, "--kv-heads", options.model.num_key_value_heads, "key/value heads");
  add_integer(command, "--vocab", options.model.vocab_size, "vocabulary");
  add_integer(command, "--seq", options.seq, "tokens of a sequence");
  add_integer(command, "--batch", options.batch, "sequences");
  add_integer(command, "--steps", options.steps, "timings, of which the median is told");
  add_integer(command, "--warmup", options.warmup, "runs before them");
  add_integer(command, "--threads", options.num_threads, "CPU threads; 0: all");
  command.add_option("--json", options.json, "write the figures to this file");
}

// Options as text, until a command reads them.
struct BenchChoices {
  std::string mode{kExpertFfnChoiceNames[0]}, device{kDeviceChoiceNames[0]}, states{kOptimizerStatesNames[0]},
      routing{kRoutingNames[0]}, dispatcher{kDispatcherChoiceNames[0]}, recipe;
};

void add_choices(CLI::App& command, BenchChoices& choices, BenchOptions& options) {
  command.add_option("--device", choices.device, "auto, cpu or cuda");
  command.add_option("--optimizer-states", choices.states, "as the configuration's optimizer_states");
  command.add_option("--optimizer-store-param-remainders", options.param_remainders,
                     "as the configuration's optimizer_store_param_remainders");
  command.add_option("--portable-kernels", options.portable_kernels,
                     "as the configuration's portable_kernels");
  command.add_option("--routing", choices.routing,
                     "random, or skewed: one expert gets every token (at --top-k 2, half of all rows)");
  command.add_option("--fp8-recipe", choices.recipe,
                     "as the configuration's fp8_config.fp8_recipe; without it nothing is quantised");
  command.add_option("--fp8-emulate", options.fp8.fp8_recipe_kwargs.emulate,
                     "as the configuration's fp8_config.fp8_recipe_kwargs.emulate");
  command.add_option("--cuda-graph", options.cuda_graph, "as the configuration's cuda_graph");
  command.add_option("--deterministic", options.deterministic, "as the configuration's deterministic");
}

// Joins the ranks that a launcher started; only then the device is known, and how experts run on it.
Ranks join(const BenchChoices& choices, BenchOptions& options) {
  RunConfig config = run_config(options);
  config.device = choice_of<DeviceChoice>("--device", choices.device, kDeviceChoiceNames);
  config.expert_ffn_mode =
      choice_of<ExpertFfnChoice>("--expert-ffn-mode", choices.mode, kExpertFfnChoiceNames);
  Ranks ranks = start_ranks(config);
  options.device = resolved_device(config.device);
  options.num_threads = config.num_threads;
  options.mode = resolved_expert_ffn_mode(config.expert_ffn_mode, options.device, options.model, options.fp8,
                                          options.portable_kernels);
  return ranks;
}

void read_choices(const BenchChoices& choices, BenchOptions& options) {
  options.states = choice_of<OptimizerStates>("--optimizer-states", choices.states, kOptimizerStatesNames);
  options.dispatcher =
      choice_of<DispatcherChoice>("--dispatcher", choices.dispatcher, kDispatcherChoiceNames);
  options.routing = choice_of<Routing>("--routing", choices.routing, kRoutingNames);
  if (choices.recipe.empty()) return;
  options.fp8.enabled = true;
  options.fp8.fp8_recipe = choice_of<Fp8Recipe>("--fp8-recipe", choices.recipe, kFp8RecipeNames);
}

}  // namespace

void add_bench(CLI::App& app) {
  CLI::App* command = app.add_subcommand("bench", "how fast this machine runs it");
  command->require_subcommand(1);
  auto options = std::make_shared<BenchOptions>();
  options->model.vocab_size = 16;
  CLI::App* step = command->add_subcommand("step", "whole training steps");
  CLI::App* moe = command->add_subcommand("moe", "whole steps with each expert_ffn_mode, side by side");
  CLI::App* ops = command->add_subcommand("ops", "each operation alone, beside the machine's ceilings");
  for (CLI::App* sub : {step, moe, ops}) add_sizes(*sub, *options);
  auto choices = std::make_shared<BenchChoices>();
  add_integer(*step, "--ep-size", options->ep,
              "ranks that the experts are split over, of those that mpirun starts");
  step->add_option("--dispatcher", choices->dispatcher, "as the configuration's parallelism.dispatcher");
  step->add_option("--shard-parameters", options->shard_parameters,
                   "as the configuration's parallelism.shard_parameters");
  step->add_option("--share-gpus", options->share_gpus, "as the configuration's parallelism.share_gpus");
  step->add_option("--expert-ffn-mode", choices->mode, "as the configuration's expert_ffn_mode");
  for (CLI::App* sub : {step, moe}) add_choices(*sub, *choices, *options);
  step->callback([options, choices] {
    check(*options);
    read_choices(*choices, *options);
    const Ranks ranks = join(*choices, *options);
    try {
      const nlohmann::json result = bench_step(*options, ranks);
      if (ranks.first()) report(*options, result);
    } catch (const Error& error) {
      throw error_of_rank(ranks, error);
    }
  });
  moe->callback([options, choices] {
    check(*options);
    read_choices(*choices, *options);
    options->device =
        resolved_device(choice_of<DeviceChoice>("--device", choices->device, kDeviceChoiceNames));
    write_json(*options, bench_moe(*options));
  });
  ops->callback([options] {
    check(*options);
    write_json(*options, bench_ops(*options));
  });
}

}  // namespace biomoe::apps
