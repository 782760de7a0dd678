// Products in a low-precision recipe. Natively, where the device multiplies the codes of a recipe: operands
// are codes and scales. Otherwise emulated exactly: an operand is replaced by what its 8-bit codes stand for,
// and the product runs in the type that the device computes in, which holds these values exactly (see
// docs/numerics.md).
#pragma once

#include <array>
#include <span>
#include <string>

#include "biomoe/core/context.h"
#include "biomoe/core/tensor_view.h"
#include "biomoe/ops/adamw.h"
#include "biomoe/ops/cuda_sizes.h"
#include "biomoe/ops/grouped_gemm.h"
#include "biomoe/ops/mx_weights.h"
#include "biomoe/quant/recipe.h"

namespace biomoe {

// Recipe DelayedScaling: the state of one operand, one entry a group.
struct DelayedScales {
  TensorView scales_G;  // f32, what elements are multiplied with
  TensorView amax_G;    // f32, raised to what is seen
};

// Codes and their scales: memory for them, flat, or those of one operand.
struct CodesAndScales {
  TensorView codes{};   // u8
  TensorView scales{};  // f32, of MX codes u8
};

// Native products: memory for the codes of rows, which may be that of all layers, for the largest of them.
// `gradient` and `input` are by column, of the operands of a weight gradient; absent where there is no
// backward. Two layers with a ScaledSwiGLU between them that a Sequential fuses share all but `gradient`.
struct RowCodes {
  CodesAndScales rows{};
  CodesAndScales gradient{}, input{};
};
// Of the largest of products of `rows` rows with weights of [experts, out, in].
struct ProductRows {
  int64_t rows = 0, out = 0, in = 0, experts = 1;
};
RowCodes allocate_row_codes(TensorAllocator& allocator, std::span<const ProductRows> products, bool training);
// RowCodes::gradient of a product alone.
CodesAndScales allocate_gradient_codes(TensorAllocator& allocator, const ProductRows& product);

// Native products of MXFP8BlockScaling: memory for both operands of any, flat, which all layers may share.
MxCodes allocate_mx_codes(TensorAllocator& allocator, std::span<const ProductRows> products, bool training);

// A ScaledSwiGLU between two native layers, as in ops/scaled_swiglu_codes.h: gate_up is forward's, and `kept`
// (absent where there is no backward) goes from forward to backward.
struct SwigluRows {
  TensorView gate_up_R2F, kept_RC, probs_R, offsets_E1;
  int64_t interleave = 0;
};

// Native products: where the codes of a layer are.
struct LayerCodes {
  // Of the weights, by quantize_weights() or AdamwArgs::codes, and good until the weights change.
  TensorView weights_EOI{};       // u8
  TensorView transposed_EIO{};    // u8; absent where there is no backward
  TensorView weight_scales_NB{};  // f32
  RowCodes rows{};                // of one product at a time
  bool in_turns = false;          // layers take turns at the memory for those of the weights
  explicit operator bool() const { return static_cast<bool>(weights_EOI); }
};
LayerCodes allocate_weight_codes(TensorAllocator& allocator, int64_t experts, int64_t out, int64_t in,
                                 bool training);

// Emulated products of MXFP8BlockScaling: memory for the values of weights of type `dtype`.
MxWeights allocate_mx_weights(TensorAllocator& allocator, DType dtype, int64_t experts, int64_t out,
                              int64_t in);

// Why products of all experts at once with weights [experts, out, in] are not native, on `device`; "" where
// they are.
std::string native_obstacle(const Fp8Config& config, Device device, int64_t out, int64_t in);

// The operands of one product of one layer.
struct OperandQuantizer {
  const Fp8Config* config = nullptr;       // null: operands stay as they are
  std::array<DelayedScales, 3> delayed{};  // by Operand; DelayedScaling only
  std::array<TensorView, 3> memory{};      // by Operand: flat, of the type computed in, for a whole operand
  LayerCodes codes{};  // present: the products of rows and weights are native, in Float8BlockScaling
  MxCodes mx{};        // present: they are in MXFP8BlockScaling; memory, of one product at a time
  // Present: the weights' operands of emulated products lie here, by quantize_weights() or AdamwArgs::codes,
  // and are good until the weights change.
  MxWeights mx_weights{};
  explicit operator bool() const { return config != nullptr; }

  // x, in groups of rows [offsets[g], offsets[g + 1]), for a product that sums over its columns or its rows.
  // The result lies in memory[operand], or mx_weights, and is good until the next call for that operand.
  TensorView rows(Context& ctx, Operand operand, bool sums_over_rows, TensorView x_RC,
                  TensorView offsets_G1) const;
  // The same for weights: each w[g] is a group.
  TensorView weights(Context& ctx, bool sums_over_rows, TensorView w_GOI) const;
  // The same for a matrix that is one group.
  TensorView matrix(Context& ctx, Operand operand, bool sums_over_rows, TensorView x_RC) const;

  // w becomes what its codes for the forward pass stand for.
  void round_weights(Context& ctx, TensorView w_GOI) const;

  // Whether there is something that is made of the weights and stays; where it is, and what makes it.
  bool keeps_weights() const { return codes || mx_weights; }
  WeightCodes weight_codes() const;
  void quantize_weights(Context& ctx, TensorView w_GOI) const;
  // Whether products of so many rows take codes; without experts, also of rows that are padded for nothing.
  bool native(int64_t rows) const { return codes && rows % cuda::kCodeRowAlignment == 0; }
  // The operands of y = x w^T, with offsets absent where there are no experts. Good until the next call of
  // any layer that shares codes.rows, as the next.
  BlockScaledCodes native_forward(Context& ctx, TensorView x_RI, TensorView offsets_G1) const;
  // Those of both products of the gradient dy, which is read once; x is read for the weight gradient, and
  // absent where there is none.
  struct BackwardCodes {
    BlockScaledCodes dgrad{};
    ColumnScaledCodes wgrad{};
  };
  BackwardCodes native_backward(Context& ctx, TensorView dy_RO, TensorView x_RI, TensorView offsets_G1) const;
  // Those of dy alone, whose part of the weight gradient's is there too where `wgrad`; and that of x.
  BackwardCodes native_gradient(Context& ctx, TensorView dy_RO, TensorView offsets_G1, bool wgrad) const;
  void native_input(Context& ctx, TensorView x_RI, TensorView offsets_G1, ColumnScaledCodes& wgrad) const;

  // The operands of y = act w^T, for act that is not there but made of what is before the activation.
  BlockScaledCodes native_forward(Context& ctx, const SwigluRows& swiglu) const;
  // This layer being the one before the activation and `down` the one after it: from the gradient of act
  // (overwritten) those of both of this layer's products, less x, and act for down's weight gradient. dprobs
  // is assigned.
  BackwardCodes native_swiglu_backward(Context& ctx, const SwigluRows& swiglu, TensorView dact_RF,
                                       TensorView dprobs_R, const OperandQuantizer& down,
                                       ColumnScaledCodes& down_wgrad) const;

  // The same of MX codes, in `mx`; both operands are quantised for each product. Rows are those of experts,
  // in groups that begin at multiples of 128, by weights [E, out, in]; or without offsets one group, by
  // weights [out, in]. Good until the next call of any layer.
  bool native_mx(int64_t rows) const { return mx && rows % cuda::kCodeRowAlignment == 0; }
  MxCodes mx_forward(Context& ctx, TensorView x_RI, TensorView w_EOI, TensorView offsets_E1) const;
  MxCodes mx_dgrad(Context& ctx, TensorView dy_RO, TensorView w_EOI, TensorView offsets_E1) const;
  MxCodes mx_wgrad(Context& ctx, TensorView dy_RO, TensorView x_RI, TensorView offsets_E1) const;
};

}  // namespace biomoe
