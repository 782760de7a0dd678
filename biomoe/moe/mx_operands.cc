// OperandQuantizer's operands of products of MX codes.
#include <algorithm>

#include "biomoe/core/arena.h"
#include "biomoe/core/error.h"
#include "biomoe/moe/operand_args.h"
#include "biomoe/moe/operand_quantizer.h"
#include "biomoe/quant/mx_grid_scales.h"

namespace biomoe {
namespace {

// Quantises x, in the groups that `args` has, and returns its codes: by row as x lies, [R, C]; by column, for
// a product that sums over x's rows, transposed, [groups C, R / groups].
CodesAndScales quantized(Context& ctx, const Fp8Config& config, Operand operand, bool by_column,
                         TensorView x_RC, QuantizeArgs args, const CodesAndScales& memory) {
  set_operand(args, quantization_spec(config, operand, by_column), x_RC);
  const int64_t rows = x_RC.shape[0], columns = x_RC.shape[1];
  const int64_t groups = args.group_rows > 0 ? rows / args.group_rows : 1;
  const Shape codes = by_column ? Shape{groups * columns, rows / groups} : Shape{rows, columns};
  const int64_t scales = MxGridScales(block_grid(args)).bytes();
  BM_CHECK(memory.codes.num_elements() >= codes.num_elements() && memory.scales.num_elements() >= scales,
           "an operand of {} and memory for {} codes and {} scales", codes.str(), memory.codes.num_elements(),
           memory.scales.num_elements());
  const CodesAndScales to{TensorView(memory.codes.data, DType::kU8, codes),
                          TensorView(memory.scales.data, DType::kU8, Shape{scales})};
  (by_column ? args.transposed_CR : args.data_RC) = to.codes;
  args.mx_scales_S = to.scales;
  quantize(ctx, args);
  return to;
}

// The codes of weights as [E, n, k].
TensorView with_experts(const TensorView& codes, int64_t experts) {
  return {codes.data, codes.dtype, Shape{experts, codes.shape[0] / experts, codes.shape[1]}};
}

MxCodes rows_by_weights(Context& ctx, const OperandQuantizer& quantizer, Operand operand, TensorView rows,
                        TensorView w_EOI, TensorView offsets_E1) {
  const Fp8Config& config = *quantizer.config;
  const MxCodes& memory = quantizer.mx;
  const bool dgrad = operand == Operand::kGradient;
  const bool matrix = w_EOI.shape.rank() == 2;
  const int64_t experts = matrix ? 1 : w_EOI.shape[0];
  const int64_t out = w_EOI.shape[matrix ? 0 : 1], in = w_EOI.shape[matrix ? 1 : 2];
  const auto a = quantized(ctx, config, operand, false, rows, {.x_RC = {}, .offsets_E1 = offsets_E1},
                           {memory.a, memory.a_scales});
  const auto b = quantized(ctx, config, Operand::kWeight, dgrad,
                           TensorView(w_EOI.data, w_EOI.dtype, Shape{experts * out, in}),
                           {.x_RC = {}, .group_rows = out}, {memory.b, memory.b_scales});
  return {.a = a.codes, .a_scales = a.scales, .b = with_experts(b.codes, experts), .b_scales = b.scales};
}

}  // namespace

MxCodes allocate_mx_codes(TensorAllocator& allocator, std::span<const ProductRows> products, bool training) {
  int64_t a = 0, a_scales = 0, b = 0, b_scales = 0;
  const auto hold = [](int64_t& codes, int64_t& scales, int64_t matrices, int64_t lines, int64_t columns) {
    codes = std::max(codes, matrices * lines * columns);
    scales = std::max(scales, matrices * MxScaleLayout::of(lines, columns).bytes());
  };
  for (const auto& [rows, out, in, experts] : products) {
    hold(a, a_scales, 1, rows, in);
    hold(b, b_scales, experts, out, in);
    if (!training) continue;
    hold(a, a_scales, 1, rows, out);
    hold(b, b_scales, experts, in, out);
    hold(a, a_scales, 1, out, rows);
    hold(b, b_scales, 1, in, rows);
  }
  return {.a = allocator.tensor(DType::kU8, {a}),
          .a_scales = allocator.tensor(DType::kU8, {a_scales}),
          .b = allocator.tensor(DType::kU8, {b}),
          .b_scales = allocator.tensor(DType::kU8, {b_scales})};
}

MxCodes OperandQuantizer::mx_forward(Context& ctx, TensorView x_RI, TensorView w_EOI,
                                     TensorView offsets_E1) const {
  return rows_by_weights(ctx, *this, Operand::kActivation, x_RI, w_EOI, offsets_E1);
}

MxCodes OperandQuantizer::mx_dgrad(Context& ctx, TensorView dy_RO, TensorView w_EOI,
                                   TensorView offsets_E1) const {
  return rows_by_weights(ctx, *this, Operand::kGradient, dy_RO, w_EOI, offsets_E1);
}

MxCodes OperandQuantizer::mx_wgrad(Context& ctx, TensorView dy_RO, TensorView x_RI,
                                   TensorView offsets_E1) const {
  const QuantizeArgs groups{.x_RC = {}, .offsets_E1 = offsets_E1};
  const auto a = quantized(ctx, *config, Operand::kGradient, true, dy_RO, groups, {mx.a, mx.a_scales});
  const auto b = quantized(ctx, *config, Operand::kActivation, true, x_RI, groups, {mx.b, mx.b_scales});
  return {.a = a.codes, .a_scales = a.scales, .b = b.codes, .b_scales = b.scales};
}

}  // namespace biomoe
