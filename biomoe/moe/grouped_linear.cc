#include "biomoe/moe/grouped_linear.h"

#include <fmt/format.h>

#include "biomoe/core/error.h"
#include "biomoe/ops/fill.h"
#include "biomoe/ops/gemm.h"
#include "biomoe/ops/grouped_gemm.h"

namespace biomoe {
namespace {

enum class Pass { kForward, kDgrad, kWgrad };

// The product for rows [begin, end) of expert `e` alone, as a dense GEMM.
void expert_gemm(Context& ctx, Pass pass, const GroupedGemmArgs& args, int64_t e, int64_t begin,
                 int64_t end) {
  const int64_t rows = end - begin;
  const TensorView expert = args.w_EOI.rows(e, 1);
  const TensorView w(expert.data, expert.dtype, Shape{expert.shape[1], expert.shape[2]});
  if (rows == 0) {
    if (pass == Pass::kWgrad && !args.accumulate) fill_zero(ctx, {.x = w});
    return;
  }
  const TensorView x = args.x_RI.rows(begin, rows), y = args.y_RO.rows(begin, rows);
  switch (pass) {
    case Pass::kForward:
      gemm(ctx, {.a = x, .b = w, .c = y, .transpose_b = true});
      break;
    case Pass::kDgrad:
      gemm(ctx, {.a = y, .b = w, .c = x});
      break;
    case Pass::kWgrad:
      gemm(ctx, {.a = y, .b = x, .c = w, .transpose_a = true, .accumulate = args.accumulate});
      break;
  }
}

void run(Context& ctx, Pass pass, const GroupedLinear& layer, const ExpertRows& rows, GroupedGemmArgs args) {
  args.offsets_E1 = rows.offsets_E1;
  args.rows_E = rows.rows_E;
  if (layer.product == GroupedProduct::kLoop) {
    BM_CHECK(ctx.device == Device::kCpu || rows.offsets_host_E1,
             "{}: a loop over experts needs offsets on the host", layer.str());
    const int64_t* offsets = rows.host_offsets().i64();
    for (int64_t e = 0; e < layer.num_experts(); ++e)
      expert_gemm(ctx, pass, args, e, offsets[e], offsets[e + 1]);
  } else if (pass == Pass::kForward) {
    grouped_gemm_forward(ctx, args);
  } else if (pass == Pass::kDgrad) {
    grouped_gemm_dgrad(ctx, args);
  } else {
    grouped_gemm_wgrad(ctx, args);
  }
}

}  // namespace

std::string GroupedLinear::str() const {
  return fmt::format("GroupedLinear({} experts, {} -> {})", num_experts(), in_features(), out_features());
}

std::string GroupedLinear::precision(Device device) const {
  if (!quantizer) return std::string(dtype_name(w_EOI.dtype));
  const std::string_view recipe = kFp8RecipeNames[static_cast<size_t>(quantizer.config->fp8_recipe)];
  if (native() || native_mx()) return fmt::format("{} native", recipe);
  std::string why = native_obstacle(*quantizer.config, device, out_features(), in_features());
  if (why.empty()) why = product == GroupedProduct::kLoop ? "one GEMM an expert" : "no memory for codes";
  return fmt::format("{} emulated: {}", recipe, why);
}

GroupedLinear::Operands GroupedLinear::forward_operands(Context& ctx, const ExpertRows& rows,
                                                        TensorView x_RI) const {
  if (!quantizer) return {x_RI, w_EOI};
  return {quantizer.rows(ctx, Operand::kActivation, false, x_RI, rows.offsets_E1),
          quantizer.weights(ctx, false, w_EOI)};
}

OperandQuantizer::BackwardCodes GroupedLinear::backward_codes(Context& ctx, const ExpertRows& rows,
                                                              TensorView dy_RO, TensorView x_RI) const {
  if (!native()) return {};
  return quantizer.native_backward(ctx, dy_RO, x_RI, rows.offsets_E1);
}

GroupedLinear::Operands GroupedLinear::dgrad_operands(Context& ctx, const ExpertRows& rows,
                                                      TensorView dy_RO) const {
  if (!quantizer) return {dy_RO, w_EOI};
  return {quantizer.rows(ctx, Operand::kGradient, false, dy_RO, rows.offsets_E1),
          quantizer.weights(ctx, true, w_EOI)};
}

void GroupedLinear::forward(Context& ctx, const ExpertRows& rows, TensorView x_RI, TensorView y_RO,
                            const BlockScaledCodes& codes) const {
  BM_CHECK(!codes || native(), "{}: codes of x, and products are not native", str());
  const BlockScaledCodes of_x =
      !codes && native() ? quantizer.native_forward(ctx, x_RI, rows.offsets_E1) : codes;
  const MxCodes mx = native_mx() ? quantizer.mx_forward(ctx, x_RI, w_EOI, rows.offsets_E1) : MxCodes();
  const auto [x, w] = of_x || mx ? Operands{x_RI, w_EOI} : forward_operands(ctx, rows, x_RI);
  run(ctx, Pass::kForward, *this, rows,
      {.x_RI = x, .w_EOI = w, .y_RO = y_RO, .offsets_E1 = {}, .codes = of_x, .mx_codes = mx});
}

void GroupedLinear::dgrad(Context& ctx, const ExpertRows& rows, TensorView dy_RO, TensorView dx_RI,
                          const BlockScaledCodes& codes) const {
  BM_CHECK(static_cast<bool>(codes) == native(), "{}: codes of dy, expected where products are native",
           str());
  const MxCodes mx = native_mx() ? quantizer.mx_dgrad(ctx, dy_RO, w_EOI, rows.offsets_E1) : MxCodes();
  const auto [dy, w] = codes || mx ? Operands{dy_RO, w_EOI} : dgrad_operands(ctx, rows, dy_RO);
  run(ctx, Pass::kDgrad, *this, rows,
      {.x_RI = dx_RI, .w_EOI = w, .y_RO = dy, .offsets_E1 = {}, .codes = codes, .mx_codes = mx});
}

void GroupedLinear::wgrad(Context& ctx, const ExpertRows& rows, TensorView dy_RO, TensorView x_RI,
                          bool accumulate, const ColumnScaledCodes& codes) const {
  BM_CHECK(static_cast<bool>(codes) == native(), "{}: codes by column, expected where products are native",
           str());
  const MxCodes mx = native_mx() ? quantizer.mx_wgrad(ctx, dy_RO, x_RI, rows.offsets_E1) : MxCodes();
  if (quantizer && !codes && !mx) {
    dy_RO = quantizer.rows(ctx, Operand::kGradient, true, dy_RO, rows.offsets_E1);
    x_RI = quantizer.rows(ctx, Operand::kActivation, true, x_RI, rows.offsets_E1);
  }
  run(ctx, Pass::kWgrad, *this, rows,
      {.x_RI = x_RI,
       .w_EOI = dw_EOI,
       .y_RO = dy_RO,
       .offsets_E1 = {},
       .accumulate = accumulate,
       .squares_P = squares_P,
       .column_codes = codes,
       .mx_codes = mx});
}

}  // namespace biomoe
