#include "biomoe/moe/mx_operands.h"

#include <fmt/format.h>

#include <algorithm>

#include "biomoe/core/error.h"
#include "biomoe/ops/cuda_sizes.h"
#include "biomoe/ops/device.h"
#include "biomoe/ops/quantize.h"
#include "biomoe/quant/mx_grid_scales.h"

namespace biomoe {
namespace {

// One operand in the memory that there is for it.
struct Room {
  TensorView codes, scales;
};

// Quantises x, in the groups that `args` has, and returns its codes: by row as x lies, [R, C]; by column, for
// a product that sums over x's rows, transposed, [groups C, R / groups].
Room quantized(Context& ctx, const Fp8Config& config, Operand operand, bool by_column, TensorView x_RC,
               QuantizeArgs args, const Room& memory) {
  const QuantizationSpec spec = quantization_spec(config, operand, by_column);
  args.x_RC = x_RC;
  args.format = spec.format;
  args.rule = spec.rule;
  args.block = spec.block;
  const int64_t rows = x_RC.shape[0], columns = x_RC.shape[1];
  const int64_t groups = args.group_rows > 0 ? rows / args.group_rows : 1;
  const Shape codes = by_column ? Shape{groups * columns, rows / groups} : Shape{rows, columns};
  const int64_t scales = MxGridScales(block_grid(args)).bytes();
  BM_CHECK(memory.codes.num_elements() >= codes.num_elements() && memory.scales.num_elements() >= scales,
           "an operand of {} and memory for {} codes and {} scales", codes.str(), memory.codes.num_elements(),
           memory.scales.num_elements());
  const Room room{TensorView(memory.codes.data, DType::kU8, codes),
                  TensorView(memory.scales.data, DType::kU8, Shape{scales})};
  (by_column ? args.transposed_CR : args.data_RC) = room.codes;
  args.mx_scales_S = room.scales;
  quantize(ctx, args);
  return room;
}

// The codes of weights as [E, n, k].
TensorView with_experts(const TensorView& codes, int64_t experts) {
  return {codes.data, codes.dtype, Shape{experts, codes.shape[0] / experts, codes.shape[1]}};
}

MxCodes rows_by_weights(Context& ctx, const MxOperands& mx, Operand operand, TensorView rows,
                        TensorView w_EOI, TensorView offsets_E1) {
  const bool dgrad = operand == Operand::kGradient;
  const bool matrix = w_EOI.shape.rank() == 2;
  const int64_t experts = matrix ? 1 : w_EOI.shape[0];
  const int64_t out = w_EOI.shape[matrix ? 0 : 1], in = w_EOI.shape[matrix ? 1 : 2];
  const Room a = quantized(ctx, *mx.config, operand, false, rows, {.x_RC = {}, .offsets_E1 = offsets_E1},
                           {mx.memory.a, mx.memory.a_scales});
  const Room b = quantized(ctx, *mx.config, Operand::kWeight, dgrad,
                           TensorView(w_EOI.data, w_EOI.dtype, Shape{experts * out, in}),
                           {.x_RC = {}, .group_rows = out}, {mx.memory.b, mx.memory.b_scales});
  return {.a = a.codes, .a_scales = a.scales, .b = with_experts(b.codes, experts), .b_scales = b.scales};
}

}  // namespace

MxCodes allocate_mx_codes(TensorAllocator& allocator, std::span<const MxProductShape> products,
                          bool training) {
  int64_t a = 0, a_scales = 0, b = 0, b_scales = 0;
  const auto hold = [](int64_t& codes, int64_t& scales, int64_t matrices, int64_t lines, int64_t columns) {
    codes = std::max(codes, matrices * lines * columns);
    scales = std::max(scales, matrices * MxScaleLayout::of(lines, columns).bytes());
  };
  for (const auto& [rows, experts, out, in] : products) {
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

std::string mx_obstacle(const Fp8Config& config, Device device, int64_t out, int64_t in) {
  if (quantization_spec(config, Operand::kGradient, false).format != Fp8Format::kE4M3) {
    return "native products are of E4M3 alone";
  }
  if (config.fp8_recipe_kwargs.emulate) return "fp8_recipe_kwargs.emulate is set";
  if (device == Device::kCpu) return "the CPU multiplies no codes";
  if (!device_available(device) || !device_info(device).mx_products) {
    return "native products are of compute capability 10.0 and a build with BIOMOE_SM100=ON";
  }
  if (out % MxScaleLayout::kBlock != 0 || in % MxScaleLayout::kBlock != 0) {
    return fmt::format("the widths {} and {} are not both multiples of {}", in, out, MxScaleLayout::kBlock);
  }
  return "";
}

bool MxOperands::of_rows(int64_t rows) const {
  return memory && rows % cuda::kCodeRowAlignment == 0;
}

MxCodes MxOperands::forward(Context& ctx, TensorView x_RI, TensorView w_EOI, TensorView offsets_E1) const {
  return rows_by_weights(ctx, *this, Operand::kActivation, x_RI, w_EOI, offsets_E1);
}

MxCodes MxOperands::dgrad(Context& ctx, TensorView dy_RO, TensorView w_EOI, TensorView offsets_E1) const {
  return rows_by_weights(ctx, *this, Operand::kGradient, dy_RO, w_EOI, offsets_E1);
}

MxCodes MxOperands::wgrad(Context& ctx, TensorView dy_RO, TensorView x_RI, TensorView offsets_E1) const {
  const QuantizeArgs groups{.x_RC = {}, .offsets_E1 = offsets_E1};
  const Room a =
      quantized(ctx, *config, Operand::kGradient, true, dy_RO, groups, {memory.a, memory.a_scales});
  const Room b =
      quantized(ctx, *config, Operand::kActivation, true, x_RI, groups, {memory.b, memory.b_scales});
  return {.a = a.codes, .a_scales = a.scales, .b = b.codes, .b_scales = b.scales};
}

}  // namespace biomoe
