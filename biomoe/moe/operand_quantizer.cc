#include "biomoe/moe/operand_quantizer.h"

#include <fmt/format.h>

#include <algorithm>

#include "biomoe/core/arena.h"
#include "biomoe/core/error.h"
#include "biomoe/ops/cuda_sizes.h"
#include "biomoe/ops/quantize.h"

namespace biomoe {
namespace {

void set_operand(QuantizeArgs& args, const QuantizationSpec& spec, TensorView x_RC) {
  args.x_RC = x_RC;
  args.format = spec.format;
  args.rule = spec.rule;
  args.block = spec.block;
}

// `groups` says how the rows of x are grouped.
TensorView quantized(Context& ctx, const OperandQuantizer& quantizer, Operand operand, bool sums_over_rows,
                     TensorView x_RC, QuantizeArgs groups) {
  const auto which = static_cast<size_t>(operand);
  const TensorView& memory = quantizer.memory[which];
  BM_CHECK(memory.dtype == x_RC.dtype && memory.num_elements() >= x_RC.num_elements(),
           "an operand of {} {} and memory for {} {}", dtype_name(x_RC.dtype), x_RC.shape.str(),
           dtype_name(memory.dtype), memory.shape.str());
  const QuantizationSpec spec = quantization_spec(*quantizer.config, operand, sums_over_rows);
  set_operand(groups, spec, x_RC);
  groups.dequantized_RC = TensorView(memory.data, x_RC.dtype, x_RC.shape);
  if (spec.rule == ScaleRule::kGiven) {
    const DelayedScales& delayed = quantizer.delayed[which];
    groups.given_scales_N = delayed.scales_G;
    groups.amax_NB = TensorView(delayed.amax_G.data, DType::kF32, Shape{delayed.amax_G.num_elements(), 1});
  }
  quantize(ctx, groups);
  return groups.dequantized_RC;
}

}  // namespace

LayerCodes allocate_weight_codes(TensorAllocator& allocator, int64_t experts, int64_t out, int64_t in,
                                 bool training) {
  constexpr int64_t kBlock = cuda::kScaleBlock;
  LayerCodes codes;
  codes.weights_EOI = allocator.tensor(DType::kU8, {experts, out, in});
  if (training) codes.transposed_EIO = allocator.tensor(DType::kU8, {experts, in, out});
  codes.weight_scales_NB = allocator.tensor(DType::kF32, {experts * (out / kBlock + 1), in / kBlock});
  return codes;
}

RowCodes allocate_row_codes(TensorAllocator& allocator, std::span<const ProductRows> products,
                            bool training) {
  int64_t outputs = 0, inputs = 0;  // codes; of as many there are scales for 128 each, of padded rows
  for (const ProductRows& product : products) {
    const int64_t rows = row_scales_stride(product.rows);
    outputs = std::max(outputs, rows * product.out);
    inputs = std::max(inputs, rows * product.in);
  }
  const auto codes_of = [&](int64_t count) { return allocator.tensor(DType::kU8, {count}); };
  const auto scales_of = [&](int64_t count) {
    return allocator.tensor(DType::kF32, {count / cuda::kScaleBlock});
  };
  const int64_t rows = training ? std::max(outputs, inputs) : inputs;
  RowCodes codes;
  codes.codes = codes_of(rows);
  codes.scales = scales_of(rows);
  if (!training) return codes;
  codes.gradient = {codes_of(outputs), scales_of(outputs)};
  codes.input = {codes_of(inputs), scales_of(inputs)};
  return codes;
}

std::string native_obstacle(const Fp8Config& config, Device device, int64_t out, int64_t in) {
  if (config.fp8_recipe != Fp8Recipe::kFloat8BlockScaling) return "native products are Float8BlockScaling's";
  if (quantization_spec(config, Operand::kGradient, false).format != Fp8Format::kE4M3) {
    return "native products are of E4M3 alone";
  }
  if (config.fp8_recipe_kwargs.emulate) return "fp8_recipe_kwargs.emulate is set";
  if (device == Device::kCpu) return "the CPU multiplies no codes";
  if (out % cuda::kScaleBlock != 0 || in % cuda::kScaleBlock != 0) {
    return fmt::format("the widths {} and {} are not both multiples of {}", in, out, cuda::kScaleBlock);
  }
  return "";
}

TensorView OperandQuantizer::rows(Context& ctx, Operand operand, bool sums_over_rows, TensorView x_RC,
                                  TensorView offsets_G1) const {
  QuantizeArgs groups;
  groups.offsets_E1 = offsets_G1;
  return quantized(ctx, *this, operand, sums_over_rows, x_RC, groups);
}

TensorView OperandQuantizer::weights(Context& ctx, bool sums_over_rows, TensorView w_GOI) const {
  QuantizeArgs groups;
  groups.group_rows = w_GOI.shape[1];
  const TensorView matrix(w_GOI.data, w_GOI.dtype, Shape{w_GOI.shape[0] * w_GOI.shape[1], w_GOI.shape[2]});
  const TensorView result = quantized(ctx, *this, Operand::kWeight, sums_over_rows, matrix, groups);
  return TensorView(result.data, result.dtype, w_GOI.shape);
}

TensorView OperandQuantizer::matrix(Context& ctx, Operand operand, bool sums_over_rows,
                                    TensorView x_RC) const {
  return quantized(ctx, *this, operand, sums_over_rows, x_RC, {});
}

WeightCodes OperandQuantizer::weight_codes() const {
  return {.rule = quantization_spec(*config, Operand::kWeight, false).rule,
          .codes_EOI = codes.weights_EOI,
          .transposed_EIO = codes.transposed_EIO,
          .scales_NB = codes.weight_scales_NB};
}

void OperandQuantizer::quantize_weights(Context& ctx, TensorView w_GOI) const {
  const int64_t experts = w_GOI.shape[0], out = w_GOI.shape[1], in = w_GOI.shape[2];
  BM_CHECK(codes.weights_EOI.shape == w_GOI.shape, "codes {} for weights {}", codes.weights_EOI.shape.str(),
           w_GOI.shape.str());
  const Shape matrix{experts * out, in};
  QuantizeArgs args;
  set_operand(args, quantization_spec(*config, Operand::kWeight, false),
              TensorView(w_GOI.data, w_GOI.dtype, matrix));
  args.group_rows = out;
  args.data_RC = TensorView(codes.weights_EOI.data, DType::kU8, matrix);
  args.scales_NB = codes.weight_scales_NB;
  if (codes.transposed_EIO) {
    args.transposed_CR = TensorView(codes.transposed_EIO.data, DType::kU8, Shape{experts * in, out});
  }
  quantize(ctx, args);
}

namespace {

// What a product that sums over columns, and one that sums over rows, take of an operand.
void ask_for_rows(QuantizeArgs& args, const RowCodes& memory) {
  const Shape scales{args.x_RC.shape[1] / cuda::kScaleBlock, row_scales_stride(args.x_RC.shape[0])};
  BM_CHECK(memory.codes.num_elements() >= args.x_RC.num_elements() &&
               memory.scales.num_elements() >= scales.num_elements(),
           "an operand of {} and memory for {} codes and {} scales", args.x_RC.shape.str(),
           memory.codes.num_elements(), memory.scales.num_elements());
  args.data_RC = TensorView(memory.codes.data, DType::kU8, args.x_RC.shape);
  args.row_scales_BR = TensorView(memory.scales.data, DType::kF32, scales);
}

void ask_for_columns(QuantizeArgs& args, const RowCodes::ByColumn& memory) {
  const int64_t rows = args.x_RC.shape[0], columns = args.x_RC.shape[1];
  const Shape scales{(rows + cuda::kScaleBlock - 1) / cuda::kScaleBlock, columns};
  BM_CHECK(memory.codes.num_elements() >= args.x_RC.num_elements() &&
               memory.scales.num_elements() >= scales.num_elements(),
           "an operand of {} and memory for {} codes by column and {} scales", args.x_RC.shape.str(),
           memory.codes.num_elements(), memory.scales.num_elements());
  args.column_codes_CR = TensorView(memory.codes.data, DType::kU8, {columns, rows});
  args.column_scales_BC = TensorView(memory.scales.data, DType::kF32, scales);
}

}  // namespace

BlockScaledCodes OperandQuantizer::native_forward(Context& ctx, TensorView x_RI,
                                                  TensorView offsets_G1) const {
  QuantizeArgs args;
  set_operand(args, quantization_spec(*config, Operand::kActivation, false), x_RI);
  args.offsets_E1 = offsets_G1;
  ask_for_rows(args, codes.rows);
  quantize(ctx, args);
  return {.rows_RK = args.data_RC,
          .row_scales_BR = args.row_scales_BR,
          .weights_ENK = codes.weights_EOI,
          .weight_scales_NB = codes.weight_scales_NB};
}

OperandQuantizer::BackwardCodes OperandQuantizer::native_backward(Context& ctx, TensorView dy_RO,
                                                                  TensorView x_RI,
                                                                  TensorView offsets_G1) const {
  QuantizeArgs gradient;
  set_operand(gradient, quantization_spec(*config, Operand::kGradient, false), dy_RO);
  gradient.offsets_E1 = offsets_G1;
  ask_for_rows(gradient, codes.rows);
  BackwardCodes result;
  if (x_RI) {
    ask_for_columns(gradient, codes.rows.gradient);
    QuantizeArgs input;
    set_operand(input, quantization_spec(*config, Operand::kActivation, false), x_RI);
    input.offsets_E1 = offsets_G1;
    ask_for_columns(input, codes.rows.input);
    quantize(ctx, input);
    result.wgrad = {.y_OR = gradient.column_codes_CR,
                    .y_scales_BO = gradient.column_scales_BC,
                    .x_IR = input.column_codes_CR,
                    .x_scales_BI = input.column_scales_BC};
  }
  quantize(ctx, gradient);
  result.dgrad = {.rows_RK = gradient.data_RC,
                  .row_scales_BR = gradient.row_scales_BR,
                  .weights_ENK = codes.transposed_EIO,
                  .weight_scales_NB = codes.weight_scales_NB};
  return result;
}

}  // namespace biomoe
