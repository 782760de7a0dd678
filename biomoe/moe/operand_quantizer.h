// Products in a low-precision recipe, emulated exactly: an operand is replaced by what its 8-bit codes stand
// for, and the product runs in the type that the device computes in, which holds these values exactly (see
// docs/numerics.md).
#pragma once

#include <array>

#include "biomoe/core/context.h"
#include "biomoe/core/tensor_view.h"
#include "biomoe/quant/recipe.h"

namespace biomoe {

// Recipe DelayedScaling: the state of one operand, one entry a group.
struct DelayedScales {
  TensorView scales_G;  // f32, what elements are multiplied with
  TensorView amax_G;    // f32, raised to what is seen
};

// The operands of one product of one layer.
struct OperandQuantizer {
  const Fp8Config* config = nullptr;       // null: operands stay as they are
  std::array<DelayedScales, 3> delayed{};  // by Operand; DelayedScaling only
  std::array<TensorView, 3> memory{};      // by Operand: flat, of the type computed in, for a whole operand
  explicit operator bool() const { return config != nullptr; }

  // x, in groups of rows [offsets[g], offsets[g + 1]), for a product that sums over its columns or its rows.
  // The result lies in memory[operand] and is good until the next call for that operand.
  TensorView rows(Context& ctx, Operand operand, bool sums_over_rows, TensorView x_RC,
                  TensorView offsets_G1) const;
  // The same for weights: each w[g] is a group.
  TensorView weights(Context& ctx, bool sums_over_rows, TensorView w_GOI) const;
  // The same for a matrix that is one group.
  TensorView matrix(Context& ctx, Operand operand, bool sums_over_rows, TensorView x_RC) const;
};

}  // namespace biomoe
