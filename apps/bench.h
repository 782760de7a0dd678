// What the benchmarks share: the options, the batch and the report.
#pragma once

#include <array>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "biomoe/core/context.h"
#include "biomoe/data/batch.h"
#include "biomoe/model/model_config.h"
#include "biomoe/moe/moe_layer.h"
#include "biomoe/optim/optim_config.h"
#include "biomoe/quant/recipe.h"
#include "biomoe/train/memory_plan.h"
#include "biomoe/train/ranks.h"
#include "biomoe/train/run_config.h"

namespace biomoe::apps {

// Where tokens go: by random router weights, about evenly; or every token to expert 0 and, with the rest of
// its top_k, anywhere: with top_k = 2 one expert gets half of all rows.
enum class Routing : uint8_t { kRandom, kSkewed };
inline constexpr std::array<std::string_view, 2> kRoutingNames{"random", "skewed"};

struct BenchOptions {
  ModelConfig model;
  int64_t seq = 512, batch = 4, steps = 10, warmup = 3, num_threads = 0;
  ExpertFfnMode mode = ExpertFfnMode::kGroupedLinear;
  Device device = Device::kCpu;
  OptimizerStates states = OptimizerStates::kFp32;
  bool param_remainders = true, cuda_graph = true, deterministic = false, portable_kernels = false;
  Routing routing = Routing::kRandom;
  int64_t ep = 1;  // ranks that the experts are split over
  DispatcherChoice dispatcher = DispatcherChoice::kAuto;
  bool shard_parameters = false, share_gpus = false;
  Fp8Config fp8{};
  std::string json;
};

// What these options are in the keys of a run, so that what is planned and refused of one is of both.
RunConfig run_config(const BenchOptions& options);

// options.batch sequences of random tokens, other ones on every rank; the last token of each has no target.
Batch random_batch(const BenchOptions& options, int64_t rank = 0);

// Version, device, threads and sizes: the head of every report.
nlohmann::json bench_header(const BenchOptions& options, const char* what);

// What makes the memory smaller, in the options of these commands.
MemoryRemedies bench_remedies();

double median_of(std::vector<double> values);

// Fills fp32 or bf16 memory of the device with normal numbers times `scale`, the same few millions again and
// again: billions in seconds. Waits for the device.
void fill_random(Context& ctx, const TensorView& view, double scale);

// Whole steps (forward, loss, backward, norm, clipping, AdamW) on random tokens, by all ranks together; every
// rank gets its report.
nlohmann::json bench_step(const BenchOptions& options, const Ranks& ranks = {});

// Whole steps with each expert_ffn_mode that the device has, and the best of them in 8 bits and in a fixed
// order of sums; says where 8 bits are slower; prints the table, with a line for each row that is refused.
// Throws the user_error of the first row when all are.
nlohmann::json bench_moe(BenchOptions options);

// The experts' products at the options' sizes, in BF16 and of E4M3 codes, and the quantisation of their
// operands; on a GPU that has both. Prints the table.
nlohmann::json bench_expert_products(const BenchOptions& options);

// Every operation of the model alone, beside two measured ceilings of the machine; prints the table. Throws
// user_error, before anything is reserved, where the memory is too little.
nlohmann::json bench_ops(const BenchOptions& options);

}  // namespace biomoe::apps
