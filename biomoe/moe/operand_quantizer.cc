#include "biomoe/moe/operand_quantizer.h"

#include <fmt/format.h>

#include <algorithm>

#include "biomoe/core/arena.h"
#include "biomoe/core/error.h"
#include "biomoe/moe/operand_args.h"
#include "biomoe/ops/cuda_sizes.h"
#include "biomoe/ops/device.h"
#include "biomoe/ops/scaled_swiglu_codes.h"
#include "biomoe/quant/mx_scale_layout.h"

namespace biomoe {
namespace {

// `groups` says how the rows of x are grouped.
TensorView quantized(Context& ctx, const OperandQuantizer& quantizer, Operand operand, bool sums_over_rows,
                     TensorView x_RC, QuantizeArgs groups) {
  if (operand == Operand::kWeight && quantizer.mx_weights) {
    const MxWeights& kept = quantizer.mx_weights;
    const Shape& shape = kept.values_EOI.shape;
    BM_CHECK(x_RC.num_elements() == shape.num_elements() && x_RC.shape[1] == shape[2],
             "weights {}, kept are {}", x_RC.shape.str(), shape.str());
    turn_mx_weights(
        ctx, {.w_EOI = TensorView(x_RC.data, x_RC.dtype, shape), .of = kept, .by_column = sums_over_rows});
    return TensorView(kept.values_EOI.data, x_RC.dtype, x_RC.shape);
  }
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

// Of `elements` of rows that are padded for their scales, of which there is one for 128.
CodesAndScales allocate_codes(TensorAllocator& allocator, int64_t elements) {
  CodesAndScales codes;
  codes.codes = allocator.tensor(DType::kU8, {elements});
  codes.scales = allocator.tensor(DType::kF32, {elements / cuda::kScaleBlock});
  return codes;
}

void check_room(const CodesAndScales& memory, const Shape& operand, const Shape& scales) {
  BM_CHECK(memory.codes.num_elements() >= operand.num_elements() &&
               memory.scales.num_elements() >= scales.num_elements(),
           "an operand of {} and memory for {} codes and {} scales", operand.str(),
           memory.codes.num_elements(), memory.scales.num_elements());
}

// What a product that sums over columns, and one that sums over rows, take of an operand.
CodesAndScales row_codes_in(const CodesAndScales& memory, const Shape& operand) {
  const Shape scales{operand[1] / cuda::kScaleBlock, row_scales_stride(operand[0])};
  check_room(memory, operand, scales);
  return {TensorView(memory.codes.data, DType::kU8, operand),
          TensorView(memory.scales.data, DType::kF32, scales)};
}

CodesAndScales column_codes_in(const CodesAndScales& memory, const Shape& operand) {
  const Shape scales{(operand[0] + cuda::kScaleBlock - 1) / cuda::kScaleBlock, operand[1]};
  check_room(memory, operand, scales);
  return {TensorView(memory.codes.data, DType::kU8, Shape{operand[1], operand[0]}),
          TensorView(memory.scales.data, DType::kF32, scales)};
}

void ask_for(QuantizeArgs& args, const CodesAndScales& rows, const CodesAndScales& columns) {
  args.data_RC = rows.codes;
  args.row_scales_BR = rows.scales;
  args.column_codes_CR = columns.codes;
  args.column_scales_BC = columns.scales;
}

QuantizeArgs quantize_args(const OperandQuantizer& quantizer, Operand operand, TensorView x_RC,
                           TensorView offsets_G1) {
  QuantizeArgs args;
  set_operand(args, quantization_spec(*quantizer.config, operand, false), x_RC);
  args.offsets_E1 = offsets_G1;
  return args;
}

// `weights`: the layer's, or its transposed ones.
BlockScaledCodes product_of(const CodesAndScales& rows, const TensorView& weights, const LayerCodes& layer) {
  return {.rows_RK = rows.codes,
          .row_scales_BR = rows.scales,
          .weights_ENK = weights,
          .weight_scales_NB = layer.weight_scales_NB};
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

MxWeights allocate_mx_weights(TensorAllocator& allocator, DType dtype, int64_t experts, int64_t out,
                              int64_t in) {
  constexpr int64_t kBlock = MxWeights::kBlock;
  const int64_t bands = experts * out / kBlock;
  return {.values_EOI = allocator.tensor(dtype, {experts, out, in}),
          .column_scales_BI = allocator.tensor(DType::kU8, {bands, in}),
          .differ_BS = allocator.tensor(DType::kI32, {bands, in / kBlock})};
}

RowCodes allocate_row_codes(TensorAllocator& allocator, std::span<const ProductRows> products,
                            bool training) {
  int64_t outputs = 0, inputs = 0;
  for (const ProductRows& product : products) {
    const int64_t rows = row_scales_stride(product.rows);
    outputs = std::max(outputs, rows * product.out);
    inputs = std::max(inputs, rows * product.in);
  }
  RowCodes codes;
  codes.rows = allocate_codes(allocator, training ? std::max(outputs, inputs) : inputs);
  if (!training) return codes;
  codes.gradient = allocate_codes(allocator, outputs);
  codes.input = allocate_codes(allocator, inputs);
  return codes;
}

CodesAndScales allocate_gradient_codes(TensorAllocator& allocator, const ProductRows& product) {
  return allocate_codes(allocator, row_scales_stride(product.rows) * product.out);
}

std::string native_obstacle(const Fp8Config& config, Device device, int64_t out, int64_t in) {
  const bool mx = config.fp8_recipe == Fp8Recipe::kMxfp8BlockScaling;
  if (!mx && config.fp8_recipe != Fp8Recipe::kFloat8BlockScaling) {
    return "native products are Float8BlockScaling's and MXFP8BlockScaling's";
  }
  if (quantization_spec(config, Operand::kGradient, false).format != Fp8Format::kE4M3) {
    return "native products are of E4M3 alone";
  }
  if (config.fp8_recipe_kwargs.emulate) return "fp8_recipe_kwargs.emulate is set";
  if (device == Device::kCpu) return "the CPU multiplies no codes";
  if (mx && (!device_available(device) || !device_info(device).mx_products)) {
    return "native products are of compute capability 10.0 and a build with BIOMOE_SM100=ON";
  }
  const int64_t block = mx ? MxScaleLayout::kBlock : cuda::kScaleBlock;
  if (out % block != 0 || in % block != 0) {
    return fmt::format("the widths {} and {} are not both multiples of {}", in, out, block);
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

void OperandQuantizer::round_weights(Context& ctx, TensorView w_GOI) const {
  const TensorView matrix(w_GOI.data, w_GOI.dtype, Shape{w_GOI.shape[0] * w_GOI.shape[1], w_GOI.shape[2]});
  QuantizeArgs args;
  set_operand(args, quantization_spec(*config, Operand::kWeight, false), matrix);
  args.group_rows = w_GOI.shape[1];
  args.dequantized_RC = matrix;
  if (args.rule == ScaleRule::kGiven)
    args.given_scales_N = delayed[static_cast<size_t>(Operand::kWeight)].scales_G;
  quantize(ctx, args);
}

WeightCodes OperandQuantizer::weight_codes() const {
  if (mx_weights) return {.mx = mx_weights};
  return {.rule = quantization_spec(*config, Operand::kWeight, false).rule,
          .codes_EOI = codes.weights_EOI,
          .transposed_EIO = codes.transposed_EIO,
          .scales_NB = codes.weight_scales_NB};
}

void OperandQuantizer::quantize_weights(Context& ctx, TensorView w_GOI) const {
  if (mx_weights) return write_mx_weights(ctx, {.w_EOI = w_GOI, .to = mx_weights});
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

BlockScaledCodes OperandQuantizer::native_forward(Context& ctx, TensorView x_RI,
                                                  TensorView offsets_G1) const {
  QuantizeArgs args = quantize_args(*this, Operand::kActivation, x_RI, offsets_G1);
  const CodesAndScales rows = row_codes_in(codes.rows.rows, x_RI.shape);
  ask_for(args, rows, {});
  quantize(ctx, args);
  return product_of(rows, codes.weights_EOI, codes);
}

OperandQuantizer::BackwardCodes OperandQuantizer::native_backward(Context& ctx, TensorView dy_RO,
                                                                  TensorView x_RI,
                                                                  TensorView offsets_G1) const {
  BackwardCodes result = native_gradient(ctx, dy_RO, offsets_G1, static_cast<bool>(x_RI));
  if (x_RI) native_input(ctx, x_RI, offsets_G1, result.wgrad);
  return result;
}

OperandQuantizer::BackwardCodes OperandQuantizer::native_gradient(Context& ctx, TensorView dy_RO,
                                                                  TensorView offsets_G1, bool wgrad) const {
  QuantizeArgs args = quantize_args(*this, Operand::kGradient, dy_RO, offsets_G1);
  const CodesAndScales rows = row_codes_in(codes.rows.rows, dy_RO.shape);
  const CodesAndScales columns = wgrad ? column_codes_in(codes.rows.gradient, dy_RO.shape) : CodesAndScales();
  ask_for(args, rows, columns);
  quantize(ctx, args);
  return {.dgrad = product_of(rows, codes.transposed_EIO, codes),
          .wgrad = {.y_OR = columns.codes, .y_scales_BO = columns.scales}};
}

void OperandQuantizer::native_input(Context& ctx, TensorView x_RI, TensorView offsets_G1,
                                    ColumnScaledCodes& wgrad) const {
  QuantizeArgs args = quantize_args(*this, Operand::kActivation, x_RI, offsets_G1);
  const CodesAndScales columns = column_codes_in(codes.rows.input, x_RI.shape);
  ask_for(args, {}, columns);
  quantize(ctx, args);
  wgrad.x_IR = columns.codes;
  wgrad.x_scales_BI = columns.scales;
}

BlockScaledCodes OperandQuantizer::native_forward(Context& ctx, const SwigluRows& swiglu) const {
  const Shape act{swiglu.gate_up_R2F.shape[0], swiglu.gate_up_R2F.shape[1] / 2};
  const CodesAndScales rows = row_codes_in(codes.rows.rows, act);
  scaled_swiglu_codes_forward(ctx, {.gate_up_R2F = swiglu.gate_up_R2F,
                                    .probs_R = swiglu.probs_R,
                                    .offsets_E1 = swiglu.offsets_E1,
                                    .act_codes_RF = rows.codes,
                                    .act_row_scales_BR = rows.scales,
                                    .kept_RC = swiglu.kept_RC,
                                    .rule = quantization_spec(*config, Operand::kActivation, false).rule,
                                    .interleave = swiglu.interleave});
  return product_of(rows, codes.weights_EOI, codes);
}

OperandQuantizer::BackwardCodes OperandQuantizer::native_swiglu_backward(
    Context& ctx, const SwigluRows& swiglu, TensorView dact_RF, TensorView dprobs_R,
    const OperandQuantizer& down, ColumnScaledCodes& down_wgrad) const {
  BM_CHECK(codes.rows.gradient.codes.data != down.codes.rows.gradient.codes.data,
           "the gradients on both sides of an activation need codes in memory of their own");
  const Shape gate_up{dact_RF.shape[0], 2 * dact_RF.shape[1]};
  const CodesAndScales rows = row_codes_in(codes.rows.rows, gate_up);
  const CodesAndScales columns = column_codes_in(codes.rows.gradient, gate_up);
  const CodesAndScales act = column_codes_in(down.codes.rows.input, dact_RF.shape);
  scaled_swiglu_codes_backward(ctx, {.dact_RF = dact_RF,
                                     .kept_RC = swiglu.kept_RC,
                                     .probs_R = swiglu.probs_R,
                                     .offsets_E1 = swiglu.offsets_E1,
                                     .dgate_up_codes_R2F = rows.codes,
                                     .dgate_up_row_scales_BR = rows.scales,
                                     .dgate_up_column_codes_2FR = columns.codes,
                                     .dgate_up_column_scales_B2F = columns.scales,
                                     .act_column_codes_FR = act.codes,
                                     .act_column_scales_BF = act.scales,
                                     .dprobs_R = dprobs_R,
                                     .rule = quantization_spec(*config, Operand::kGradient, false).rule,
                                     .interleave = swiglu.interleave});
  down_wgrad.x_IR = act.codes;
  down_wgrad.x_scales_BI = act.scales;
  return {.dgrad = product_of(rows, codes.transposed_EIO, codes),
          .wgrad = {.y_OR = columns.codes, .y_scales_BO = columns.scales}};
}

}  // namespace biomoe
