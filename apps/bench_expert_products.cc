#include <algorithm>
#include <array>
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
#include "biomoe/quant/compact_bf16.h"

namespace biomoe::apps {
namespace {

// Of one layer, with R rows padded for each of E experts.
struct ProductTensors {
  TensorView x_RD, act_RF, gate_up_R2F, dgate_up_R2F, dact_RF, kept_RC;
  TensorView w_E2FD, w_EDF;
  TensorView probs_R, dprobs_R, offsets_E1, rows_E;
  TensorView dw_E2FD;  // and of down, which is half of it
  LayerCodes gate_up, down;
  MxWeights mx_down;
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
  const int64_t R = sizes.R();
  ProductTensors at;
  at.x_RD = to.tensor(DType::kBF16, {R, D});
  at.act_RF = to.tensor(DType::kBF16, {R, F});
  at.dact_RF = to.tensor(DType::kBF16, {R, F});
  at.gate_up_R2F = to.tensor(DType::kBF16, {R, 2 * F});
  at.dgate_up_R2F = to.tensor(DType::kBF16, {R, 2 * F});
  at.kept_RC = to.tensor(DType::kU8, {R, CompactLayout::row_bytes(F)});
  at.w_E2FD = to.tensor(DType::kBF16, {E, 2 * F, D});
  at.w_EDF = to.tensor(DType::kBF16, {E, D, F});
  at.probs_R = to.tensor(DType::kF32, {R});
  at.dprobs_R = to.tensor(DType::kF32, {R});
  at.offsets_E1 = to.tensor(DType::kI64, {E + 1});
  at.rows_E = to.tensor(DType::kI32, {E});
  at.dw_E2FD = to.tensor(DType::kBF16, {E, 2 * F, D});
  for (TensorView* view : {&at.grad_A, &at.exp_avg_A, &at.exp_avg_sq_A}) {
    *view = to.tensor(DType::kBF16, {E * D * F});
  }
  at.update_5 = to.tensor(DType::kF64, {kNumUpdateValues});
  at.gate_up = allocate_weight_codes(to, E, 2 * F, D, true);
  at.down = allocate_weight_codes(to, E, D, F, true);
  const std::array<ProductRows, 2> products{{{R, 2 * F, D}, {R, D, F}}};
  at.gate_up.rows = at.down.rows = allocate_row_codes(to, products, true);
  at.down.rows.gradient = allocate_gradient_codes(to, products[1]);
  at.mx_down = allocate_mx_weights(to, DType::kBF16, E, D, F);
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
// and with those of the down weights, in whose update AdamW writes their codes; with SwiGLU between them.
void time_quantising(Context& ctx, const ProductTensors& at, const OperandQuantizer& gate_up,
                     const OperandQuantizer& down, nlohmann::json& rows) {
  const auto time_bytes = [&](const char* name, double bytes, const std::function<void()>& run) {
    const double seconds = seconds_of(ctx, run);
    fmt::print(kQuantizeRow, name, seconds * 1e3, bytes / seconds * 1e-9);
    rows.push_back({{"quantisation", name}, {"ms", seconds * 1e3}, {"gb_per_s", bytes / seconds * 1e-9}});
  };
  const auto elements = [](const TensorView& view) { return static_cast<double>(view.num_elements()); };
  fmt::print("\nquantising their operands: ms, GB/s read and written\n");
  const double wide = elements(at.dgate_up_R2F), narrow = elements(at.x_RD);
  time_bytes("x 1x128", 3 * narrow, [&] { gate_up.native_forward(ctx, at.x_RD, at.offsets_E1); });
  time_bytes("dy 1x128", 3 * wide, [&] { gate_up.native_backward(ctx, at.dgate_up_R2F, {}, at.offsets_E1); });
  time_bytes("dy both ways, x 128x1", 4 * wide + 3 * narrow,
             [&] { gate_up.native_backward(ctx, at.dgate_up_R2F, at.x_RD, at.offsets_E1); });
  const SwigluRows swiglu{at.gate_up_R2F, at.kept_RC, at.probs_R, at.offsets_E1, cuda::kGateUpInterleave};
  SwigluRows not_kept = swiglu;
  not_kept.kept_RC = {};
  const double kept = elements(at.kept_RC);
  ColumnScaledCodes act;
  time_bytes("SwiGLU, act 1x128", 2.5 * wide, [&] { down.native_forward(ctx, not_kept); });
  time_bytes("the same, kept for backward", 2.5 * wide + kept, [&] { down.native_forward(ctx, swiglu); });
  time_bytes("dSwiGLU both ways, act 128x1", 3.5 * wide + kept,
             [&] { gate_up.native_swiglu_backward(ctx, swiglu, at.dact_RF, at.dprobs_R, down, act); });
  time_bytes("weights 128x128", 4 * elements(at.w_E2FD), [&] { gate_up.quantize_weights(ctx, at.w_E2FD); });
  // A rate of 0 leaves the weights as they are.
  const std::vector<double> update = {0, 1, 1, 1, 1};
  copy_to_device(ctx, at.update_5.data, update.data(), at.update_5.bytes());
  fill_random(ctx, at.grad_A, 1.0);
  for (const TensorView* view : {&at.exp_avg_A, &at.exp_avg_sq_A}) fill_zero(ctx, {.x = *view});
  device_wait_sync(ctx);
  const double updated = elements(at.grad_A);
  const std::vector<ArenaSegment> segments = {{0, at.grad_A.num_elements(), true}};
  const std::vector<WeightCodes> codes = {down.weight_codes()}, mx = {{.mx = at.mx_down}};
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
  time_bytes("AdamW, MXFP8 values of them", 16 * updated, [&] { adamw_with(mx); });
  time_bytes("MXFP8 values alone", 4 * updated,
             [&] { write_mx_weights(ctx, {.w_EOI = at.w_EDF, .to = at.mx_down}); });
  bool by_column = false;
  time_bytes("from row to column and back", updated / 256, [&] {
    turn_mx_weights(ctx, {.w_EOI = at.w_EDF, .of = at.mx_down, .by_column = by_column = !by_column});
  });
  time_bytes("copy", 4 * wide,
             [&] { copy_on_device(ctx, at.gate_up_R2F.data, at.dgate_up_R2F.data, at.gate_up_R2F.bytes()); });
}

// Of one product: of rows and weights, or of a weight gradient.
struct ProductCodes {
  BlockScaledCodes rows{};
  ColumnScaledCodes columns{};
};

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
  const bool native = native_obstacle(config, options.device, sizes.D, sizes.F).empty();
  nlohmann::json rows = nlohmann::json::array();

  const double real = static_cast<double>(options.seq * options.batch * options.model.num_experts_per_tok);
  const double flops = 2.0 * real * static_cast<double>(sizes.D) * static_cast<double>(sizes.F);
  using Run = std::function<void(const ProductCodes&)>;
  const auto time = [&](const char* name, double parts, const std::function<ProductCodes()>& quantized,
                        const Run& run) {
    const double bf16 = seconds_of(ctx, [&] { run({}); });
    nlohmann::json row{{"product", name}, {"bf16_tflops", parts * flops / bf16 * 1e-12}};
    std::string fp8 = "", ratio = "";
    if (native) {
      const ProductCodes codes = quantized();
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
  const auto forward = [&](const OperandQuantizer& of, const TensorView& x) {
    return [&] { return ProductCodes{.rows = of.native_forward(ctx, x, at.offsets_E1)}; };
  };
  const auto backward = [&](const OperandQuantizer& of, const TensorView& dy, const TensorView& x) {
    return [&] {
      const auto [dgrad, wgrad] = of.native_backward(ctx, dy, x, at.offsets_E1);
      return ProductCodes{dgrad, wgrad};
    };
  };
  // SwiGLU is in the epilogues of BF16, and beside the products of codes.
  time("gate_up (bf16: + SwiGLU)", 2, forward(gate_up, at.x_RD), [&](const ProductCodes& codes) {
    if (codes.rows) {
      grouped_gemm_forward(ctx, {.x_RI = at.x_RD,
                                 .w_EOI = at.w_E2FD,
                                 .y_RO = at.gate_up_R2F,
                                 .offsets_E1 = at.offsets_E1,
                                 .rows_E = at.rows_E,
                                 .codes = codes.rows});
      return;
    }
    grouped_gate_up(ctx, {.x_RD = at.x_RD,
                          .w_E2FD = at.w_E2FD,
                          .gate_up_R2F = at.gate_up_R2F,
                          .probs_R = at.probs_R,
                          .act_RF = at.act_RF,
                          .offsets_E1 = at.offsets_E1,
                          .rows_E = at.rows_E,
                          .interleave = cuda::kGateUpInterleave});
  });
  time("down", 1, forward(down, at.act_RF), [&](const ProductCodes& codes) {
    grouped_gemm_forward(ctx, {.x_RI = at.act_RF,
                               .w_EOI = at.w_EDF,
                               .y_RO = at.x_RD,
                               .offsets_E1 = at.offsets_E1,
                               .rows_E = at.rows_E,
                               .codes = codes.rows});
  });
  time("down dgrad (bf16: + dSwiGLU)", 1, backward(down, at.x_RD, at.act_RF), [&](const ProductCodes& codes) {
    if (codes.rows) {
      grouped_gemm_dgrad(ctx, {.x_RI = at.dact_RF,
                               .w_EOI = at.w_EDF,
                               .y_RO = at.x_RD,
                               .offsets_E1 = at.offsets_E1,
                               .rows_E = at.rows_E,
                               .codes = codes.rows});
      return;
    }
    grouped_down_backward(ctx, {.dy_RD = at.x_RD,
                                .w_EDF = at.w_EDF,
                                .gate_up_R2F = at.gate_up_R2F,
                                .probs_R = at.probs_R,
                                .dact_RF = at.dact_RF,
                                .dgate_up_R2F = at.dgate_up_R2F,
                                .dprobs_R = at.dprobs_R,
                                .offsets_E1 = at.offsets_E1,
                                .rows_E = at.rows_E,
                                .interleave = cuda::kGateUpInterleave});
  });
  time("gate_up dgrad", 2, backward(gate_up, at.dgate_up_R2F, at.x_RD), [&](const ProductCodes& codes) {
    grouped_gemm_dgrad(ctx, {.x_RI = at.x_RD,
                             .w_EOI = at.w_E2FD,
                             .y_RO = at.dgate_up_R2F,
                             .offsets_E1 = at.offsets_E1,
                             .rows_E = at.rows_E,
                             .codes = codes.rows});
  });
  const auto wgrad = [&](const TensorView& dy, const TensorView& x, const TensorView& w) {
    return [&](const ProductCodes& codes) {
      grouped_gemm_wgrad(ctx, {.x_RI = x,
                               .w_EOI = TensorView(at.dw_E2FD.data, DType::kBF16, w.shape),
                               .y_RO = dy,
                               .offsets_E1 = at.offsets_E1,
                               .rows_E = at.rows_E,
                               .column_codes = codes.columns});
    };
  };
  time("gate_up wgrad", 2, backward(gate_up, at.dgate_up_R2F, at.x_RD),
       wgrad(at.dgate_up_R2F, at.x_RD, at.w_E2FD));
  time("down wgrad", 1, backward(down, at.x_RD, at.act_RF), wgrad(at.x_RD, at.act_RF, at.w_EDF));
  if (!native) return rows;
  time_quantising(ctx, at, gate_up, down, rows);
  return rows;
}

}  // namespace biomoe::apps
