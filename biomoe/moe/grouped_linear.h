// GroupedLinear: one linear map an expert, over rows in expert order.
#pragma once

#include <string>

#include "biomoe/core/context.h"
#include "biomoe/core/tensor_view.h"
#include "biomoe/moe/expert_rows.h"
#include "biomoe/moe/operand_quantizer.h"

namespace biomoe {

enum class GroupedProduct : uint8_t {
  kGrouped,  // all experts in one operation
  kLoop,     // one GEMM an expert: the baseline; off the CPU the host must know the rows
};

// y[r] = x[r] w[e]^T for the rows r of expert e. The tensors belong to the caller; the layer is a view on
// them and is copied freely.
struct GroupedLinear {
  TensorView w_EOI;        // [E, out, in]
  TensorView dw_EOI{};     // gradient; needed by wgrad only
  TensorView squares_P{};  // optional, assigned by wgrad: see GroupedGemmArgs
  GroupedProduct product = GroupedProduct::kGrouped;
  OperandQuantizer quantizer{};

  int64_t num_experts() const { return w_EOI.shape[0]; }
  int64_t out_features() const { return w_EOI.shape[1]; }
  int64_t in_features() const { return w_EOI.shape[2]; }
  // Codes are multiplied, those of Float8BlockScaling, or of MXFP8BlockScaling.
  bool native() const { return quantizer.codes && product == GroupedProduct::kGrouped; }
  bool native_mx() const { return quantizer.mx && product == GroupedProduct::kGrouped; }
  std::string str() const;  // "GroupedLinear(8 experts, 64 -> 256)"
  // How its products run on `device`: "bf16", "Float8BlockScaling native" or "... emulated: <why>".
  std::string precision(Device device) const;

  // What the products of forward and dgrad multiply where the layer is not native: rows (x, or dy) and
  // weights, quantised where there is a quantizer. Good until the next call.
  struct Operands {
    TensorView rows, weights;
  };
  Operands forward_operands(Context& ctx, const ExpertRows& rows, TensorView x_RI) const;
  Operands dgrad_operands(Context& ctx, const ExpertRows& rows, TensorView dy_RO) const;

  // Where a native layer is given the codes of its operands, those of x and dy need no memory: only their
  // shapes and types are read. y assigned; without codes a native layer makes those of x.
  void forward(Context& ctx, const ExpertRows& rows, TensorView x_RI, TensorView y_RO,
               const BlockScaledCodes& codes = {}) const;
  // Backward begins with the codes of both of its products, where the layer is native; else there are none.
  // x may be absent where wgrad does not follow.
  OperandQuantizer::BackwardCodes backward_codes(Context& ctx, const ExpertRows& rows, TensorView dy_RO,
                                                 TensorView x_RI) const;
  // dx assigned.
  void dgrad(Context& ctx, const ExpertRows& rows, TensorView dy_RO, TensorView dx_RI,
             const BlockScaledCodes& codes = {}) const;
  // dw assigned, or added to.
  void wgrad(Context& ctx, const ExpertRows& rows, TensorView dy_RO, TensorView x_RI, bool accumulate,
             const ColumnScaledCodes& codes = {}) const;
};

}  // namespace biomoe
