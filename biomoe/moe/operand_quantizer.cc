#include "biomoe/moe/operand_quantizer.h"

#include "biomoe/core/error.h"
#include "biomoe/ops/quantize.h"

namespace biomoe {
namespace {

// `groups` says how the rows of x are grouped.
TensorView quantized(Context& ctx, const OperandQuantizer& quantizer, Operand operand, bool sums_over_rows,
                     TensorView x_RC, QuantizeArgs groups) {
  const auto which = static_cast<size_t>(operand);
  const TensorView& memory = quantizer.memory[which];
  BM_CHECK(memory.dtype == x_RC.dtype && memory.num_elements() >= x_RC.num_elements(),
           "an operand of {} {} and memory for {} {}", dtype_name(x_RC.dtype), x_RC.shape.str(),
           dtype_name(memory.dtype), memory.shape.str());
  const QuantizationSpec spec = quantization_spec(*quantizer.config, operand, sums_over_rows);
  groups.x_RC = x_RC;
  groups.format = spec.format;
  groups.rule = spec.rule;
  groups.block = spec.block;
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

}  // namespace biomoe
