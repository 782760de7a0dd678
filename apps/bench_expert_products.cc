#include <algorithm>
#include <functional>

#include "apps/bench.h"
#include "biomoe/core/arena.h"
#include "biomoe/core/clock.h"
#include "biomoe/core/rng.h"
#include "biomoe/moe/operand_quantizer.h"
#include "biomoe/ops/adamw.h"
#include "biomoe/ops/cuda_sizes.h"
#include "biomoe/ops/device.h"
#include "biomoe/ops/fill.h"
#include "biomoe/ops/grouped_gemm.h"
#include "biomoe/ops/quantize.h"

namespace biomoe::apps {
namespace {

// Of one layer, with R rows padded for each of E experts.
struct ProductTensors {
  TensorView x_RD, act_RF, gate_up_R2F, dgate_up_R2F, dact_RF;
  TensorView w_E2FD, w_EDF;
  TensorView probs_R, dprobs_R, offsets_E1, rows_E;
  LayerCodes gate_up, down;
  TensorView codes, scales;  // of rows
  TensorView column_codes_CR, column_scales_BC;
  TensorView grad_A, exp_avg_A, exp_avg_sq_A, update_5;  // of w_EDF
};

struct Sizes {
  int64_t D, F, E;
  std::vector<int32_t> rows;  // real ones of the experts
  std::vector<int64_t> offsets{0};
  int64_t R() const { return offsets.back(); }
};

Sizes sizes_of(const BenchOptions& options) {
  const ModelConfig& model = options.model;
  Sizes sizes{model.hidden_size,
              model.intermediate_size,
              model.num_local_experts,
              std::vector<int32_t>(static_cast<size_t>(model.num_local_experts)),
              {0}};
  const Rng rng(2, RngStream::kTest);
  for (int64_t slot = 0; slot < options.seq * options.batch * model.num_experts_per_tok; ++slot) {
    const uint64_t draw = rng.u64(static_cast<uint64_t>(slot));
    ++sizes.rows[static_cast<size_t>(draw % static_cast<uint64_t>(sizes.E))];
  }
  for (const int32_t rows : sizes.rows) {
    const int64_t tiles = (rows + cuda::kExpertRowAlignment - 1) / cuda::kExpertRowAlignment;
    sizes.offsets.push_back(sizes.R() + tiles * cuda::kExpertRowAlignment);
  }
  return sizes;
}

ProductTensors lay_out(TensorAllocator& to, const Sizes& sizes) {
  const auto [D, F, E] = std::tuple{sizes.D, sizes.F, sizes.E};
  const int64_t R = sizes.R(), widest = std::max(2 * F, D);
  ProductTensors at;
  at.x_RD = to.tensor(DType::kBF16, {R, D});
  at.act_RF = to.tensor(DType::kBF16, {R, F});
  at.dact_RF = to.tensor(DType::kBF16, {R, F});
  at.gate_up_R2F = to.tensor(DType::kBF16, {R, 2 * F});
  at.dgate_up_R2F = to.tensor(DType::kBF16, {R, 2 * F});
  at.w_E2FD = to.tensor(DType::kBF16, {E, 2 * F, D});
  at.w_EDF = to.tensor(DType::kBF16, {E, D, F});
  at.probs_R = to.tensor(DType::kF32, {R});
  at.dprobs_R = to.tensor(DType::kF32, {R});
  at.offsets_E1 = to.tensor(DType::kI64, {E + 1});
  at.rows_E = to.tensor(DType::kI32, {E});
  at.codes = to.tensor(DType::kU8, {R * widest});
  at.scales = to.tensor(DType::kF32, {widest / cuda::kScaleBlock * row_scales_stride(R)});
  at.column_codes_CR = to.tensor(DType::kU8, {2 * F, R});
  at.column_scales_BC = to.tensor(DType::kF32, {R / cuda::kScaleBlock, 2 * F});
  for (TensorView* view : {&at.grad_A, &at.exp_avg_A, &at.exp_avg_sq_A}) {
    *view = to.tensor(DType::kBF16, {E * D * F});
  }
  at.update_5 = to.tensor(DType::kF64, {kNumUpdateValues});
  at.gate_up = allocate_weight_codes(to, E, 2 * F, D, true);
  at.down = allocate_weight_codes(to, E, D, F, true);
  for (LayerCodes* codes : {&at.gate_up, &at.down}) {
    codes->rows = at.codes;
    codes->row_scales = at.scales;
  }
  return at;
}

// Seconds of a call among many, after as many as settle the clock of a card at its power limit.
double seconds_of(Context& ctx, const std::function<void()>& call) {
  constexpr double kSettle = 0.2, kTimed = 0.1;
  const auto time = [&](int64_t calls) {
    const double begin = now_seconds();
    for (int64_t i = 0; i < calls; ++i) call();
    device_wait_sync(ctx);
    return (now_seconds() - begin) / static_cast<double>(calls);
  };
  time(1);
  const double once = time(3);
  const auto calls_in = [&](double seconds) {
    return std::max<int64_t>(3, static_cast<int64_t>(seconds / once));
  };
  time(calls_in(kSettle));
  return time(calls_in(kTimed));
}

constexpr const char* kProductRow = "{:<28} {:>10} {:>10} {:>8}\n";
constexpr const char* kQuantizeRow = "{:<28} {:>10.3f} {:>10.0f}\n";

// Adds to `rows` how long it takes to quantise the operands of the products with the gate and up weights,
// and with those of the down weights, in whose update AdamW writes their codes.
void time_quantising(Context& ctx, const Sizes& sizes, const ProductTensors& at,
                     const OperandQuantizer& gate_up, const OperandQuantizer& down, nlohmann::json& rows) {
  const auto time_bytes = [&](const char* name, double bytes, const std::function<void()>& run) {
    const double seconds = seconds_of(ctx, run);
    fmt::print(kQuantizeRow, name, seconds * 1e3, bytes / seconds * 1e-9);
    rows.push_back({{"quantisation", name}, {"ms", seconds * 1e3}, {"gb_per_s", bytes / seconds * 1e-9}});
  };
  const auto elements = [](const TensorView& view) { return static_cast<double>(view.num_elements()); };
  fmt::print("\nquantising their operands: ms, GB/s read and written\n");
  const double wide = elements(at.dgate_up_R2F), weights = elements(at.w_E2FD);
  time_bytes("rows 1x128 -> codes", 3 * wide,
             [&] { gate_up.native_operands(ctx, Operand::kGradient, at.dgate_up_R2F, at.offsets_E1, true); });
  const auto columns = [&](bool rows_too) {
    QuantizeArgs args{.x_RC = at.dgate_up_R2F};
    args.rule = quantization_spec(*gate_up.config, Operand::kGradient, true).rule;
    args.block = {1, cuda::kScaleBlock};
    args.offsets_E1 = at.offsets_E1;
    if (rows_too) {
      args.data_RC = TensorView(at.codes.data, DType::kU8, at.dgate_up_R2F.shape);
      args.row_scales_BR = TensorView(at.scales.data, DType::kF32,
                                      {2 * sizes.F / cuda::kScaleBlock, row_scales_stride(sizes.R())});
    }
    args.column_codes_CR = at.column_codes_CR;
    args.column_scales_BC = at.column_scales_BC;
    quantize(ctx, args);
  };
  time_bytes("rows 128x1 -> codes", 3 * wide, [&] { columns(false); });
  time_bytes("rows both ways -> codes", 4 * wide, [&] { columns(true); });
  time_bytes("rows 128x1 -> BF16", 4 * wide,
             [&] { gate_up.rows(ctx, Operand::kGradient, true, at.dgate_up_R2F, at.offsets_E1); });
  time_bytes("weights 128x128 -> codes", 4 * weights, [&] { gate_up.quantize_weights(ctx, at.w_E2FD); });
  // A rate of 0 leaves the weights as they are.
  const std::vector<double> update = {0, 1, 1, 1, 1};
  copy_to_device(ctx, at.update_5.data, update.data(), at.update_5.bytes());
  fill_random(ctx, at.grad_A, 1.0);
  for (const TensorView* view : {&at.exp_avg_A, &at.exp_avg_sq_A}) fill_zero(ctx, {.x = *view});
  device_wait_sync(ctx);
  const double updated = elements(at.grad_A);
  const std::vector<ArenaSegment> segments = {{0, at.grad_A.num_elements(), true}};
  const std::vector<WeightCodes> codes = {down.weight_codes()};
  const auto adamw_with = [&](std::span<const WeightCodes> written) {
    adamw(ctx, {.weights_A = TensorView(at.w_EDF.data, DType::kBF16, at.grad_A.shape),
                .grad_A = at.grad_A,
                .exp_avg_A = at.exp_avg_A,
                .exp_avg_sq_A = at.exp_avg_sq_A,
                .segments = segments,
                .codes = written,
                .update_5 = at.update_5});
  };
  time_bytes("AdamW", 14 * updated, [&] { adamw_with({}); });
  time_bytes("AdamW, codes of its weights", 16 * updated, [&] { adamw_with(codes); });
  time_bytes("copy", 4 * wide,
             [&] { copy_on_device(ctx, at.gate_up_R2F.data, at.dgate_up_R2F.data, at.gate_up_R2F.bytes()); });
}

}  // namespace

nlohmann::json bench_expert_products(const BenchOptions& options) {
  const Sizes sizes = sizes_of(options);
  const DeviceHandle handle(options.device);
  Context ctx{.device = options.device, .state = handle.get()};
  Arena arena(planned_bytes([&](TensorAllocator& to) { lay_out(to, sizes); }), "the operands of products",
              device_memory(options.device));
  const ProductTensors at = lay_out(arena, sizes);
  for (const TensorView* view : {&at.x_RD, &at.act_RF, &at.gate_up_R2F, &at.dgate_up_R2F, &at.probs_R}) {
    fill_random(ctx, *view, 1.0);
  }
  for (const TensorView* view : {&at.w_E2FD, &at.w_EDF}) fill_random(ctx, *view, 0.02);
  copy_to_device(ctx, at.offsets_E1.data, sizes.offsets.data(), at.offsets_E1.bytes());
  copy_to_device(ctx, at.rows_E.data, sizes.rows.data(), at.rows_E.bytes());
  device_wait_sync(ctx);

  Fp8Config config;
  config.enabled = true;
  config.fp8_recipe = Fp8Recipe::kFloat8BlockScaling;
  OperandQuantizer gate_up{.config = &config, .codes = at.gate_up}, down{.config = &config, .codes = at.down};
  gate_up.memory[static_cast<size_t>(Operand::kGradient)] =
      TensorView(at.gate_up_R2F.data, DType::kBF16, Shape{at.gate_up_R2F.num_elements()});
  const bool native = native_obstacle(config, options.device, sizes.D, sizes.F).empty();
  nlohmann::json rows = nlohmann::json::array();

  const double real = static_cast<double>(options.seq * options.batch * options.model.num_experts_per_tok);
  const double flops = 2.0 * real * static_cast<double>(sizes.D) * static_cast<double>(sizes.F);
  using Run = std::function<void(const BlockScaledCodes&)>;
  const auto time = [&](const char* name, double parts, const OperandQuantizer& quantizer, Operand operand,
                        const TensorView& x, bool transposed, const Run& run) {
    const double bf16 = seconds_of(ctx, [&] { run({}); });
    nlohmann::json row{{"product", name}, {"bf16_tflops", parts * flops / bf16 * 1e-12}};
    std::string fp8 = "", ratio = "";
    if (native) {
      const BlockScaledCodes codes = quantizer.native_operands(ctx, operand, x, at.offsets_E1, transposed);
      const double seconds = seconds_of(ctx, [&] { run(codes); });
      row["fp8_tflops"] = parts * flops / seconds * 1e-12;
      fp8 = fmt::format("{:.0f}", row["fp8_tflops"].get<double>());
      ratio = fmt::format("{:.2f}x", bf16 / seconds);
    }
    fmt::print(kProductRow, name, fmt::format("{:.0f}", row["bf16_tflops"].get<double>()), fp8, ratio);
    rows.push_back(row);
  };
  fmt::print("\nexperts' products, {} rows: TFLOP/s\n", static_cast<int64_t>(real));
  fmt::print(kProductRow, "", "bf16", "fp8", "");
  if (native) {
    gate_up.quantize_weights(ctx, at.w_E2FD);
    down.quantize_weights(ctx, at.w_EDF);
  }
  time("gate_up + SwiGLU", 2, gate_up, Operand::kActivation, at.x_RD, false,
       [&](const BlockScaledCodes& codes) {
         grouped_gate_up(ctx, {.x_RD = at.x_RD,
                               .w_E2FD = at.w_E2FD,
                               .gate_up_R2F = at.gate_up_R2F,
                               .probs_R = at.probs_R,
                               .act_RF = at.act_RF,
                               .offsets_E1 = at.offsets_E1,
                               .rows_E = at.rows_E,
                               .interleave = cuda::kGateUpInterleave,
                               .codes = codes});
       });
  time("down", 1, down, Operand::kActivation, at.act_RF, false, [&](const BlockScaledCodes& codes) {
    grouped_gemm_forward(ctx, {.x_RI = at.act_RF,
                               .w_EOI = at.w_EDF,
                               .y_RO = at.x_RD,
                               .offsets_E1 = at.offsets_E1,
                               .rows_E = at.rows_E,
                               .codes = codes});
  });
  time("down dgrad + dSwiGLU", 1, down, Operand::kGradient, at.x_RD, true,
       [&](const BlockScaledCodes& codes) {
         grouped_down_backward(ctx, {.dy_RD = at.x_RD,
                                     .w_EDF = at.w_EDF,
                                     .gate_up_R2F = at.gate_up_R2F,
                                     .probs_R = at.probs_R,
                                     .dact_RF = at.dact_RF,
                                     .dgate_up_R2F = at.dgate_up_R2F,
                                     .dprobs_R = at.dprobs_R,
                                     .offsets_E1 = at.offsets_E1,
                                     .rows_E = at.rows_E,
                                     .interleave = cuda::kGateUpInterleave,
                                     .codes = codes});
       });
  time("gate_up dgrad", 2, gate_up, Operand::kGradient, at.dgate_up_R2F, true,
       [&](const BlockScaledCodes& codes) {
         grouped_gemm_dgrad(ctx, {.x_RI = at.x_RD,
                                  .w_EOI = at.w_E2FD,
                                  .y_RO = at.dgate_up_R2F,
                                  .offsets_E1 = at.offsets_E1,
                                  .rows_E = at.rows_E,
                                  .codes = codes});
       });
  if (!native) return rows;
  time_quantising(ctx, sizes, at, gate_up, down, rows);
  return rows;
}

}  // namespace biomoe::apps
