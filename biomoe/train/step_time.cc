#include "biomoe/train/step_time.h"

#include <algorithm>

#include "biomoe/core/clock.h"
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

}  // namespace

StepTime estimate_step_time(const RunConfig& config, double measure_seconds) {
  const ModelConfig& model = config.model;
  const DataConfig& data = config.dataset;
  StepTime time;
  time.num_threads = resolved_threads(config.num_threads);
  const bool alone = planned_place(config).size.world() == 1;
  const char* const not_counted = alone ? "" : "; the time between ranks is not counted";
  time.flops = sequence_flops(model, data.max_seq_length) *
               static_cast<double>(data.token_micro_batch_size * config.grad_acc_steps) /
               static_cast<double>(data.max_seq_length);
  if (planned_device(config.device) == Device::kCuda) {
    constexpr double kFlopsPerSecond = 630e12, kBytesPerSecond = 4.2e12;
    const double fp32 = config.optimizer_store_param_remainders ? 26 : 28;
    const double bytes = config.optimizer_states == OptimizerStates::kBf16 ? 14 : fp32;  // a parameter
    time.flops_per_second = kFlopsPerSecond;
    time.update_seconds = static_cast<double>(ParameterList(model, planned_place(config)).owned_elements()) *
                          bytes / kBytesPerSecond;
    time.basis = fmt::format(
        "an H200's grouped products, and AdamW at its memory's rate (stated, not measured here){}",
        not_counted);
    return time;
  }
  time.basis = fmt::format("this machine's matrix products with {} threads (measured now){}",
                           time.num_threads, not_counted);
  // A product of these sides takes milliseconds; larger ones run at the same rate.
  constexpr int64_t kLargest = 1024;
  const int64_t rows = data.token_micro_batch_size * model.num_experts_per_tok / model.num_local_experts;
  time.flops_per_second =
      measure_product(std::clamp<int64_t>(rows, 1, kLargest), std::min(2 * model.intermediate_size, kLargest),
                      std::min(model.hidden_size, kLargest), time.num_threads, measure_seconds);
  return time;
}

}  // namespace biomoe
