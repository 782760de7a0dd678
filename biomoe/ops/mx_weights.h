// Weights as the codes of MXFP8BlockScaling stand for them, for products that are emulated: one copy for both
// directions of a product.
#pragma once

#include "biomoe/core/context.h"
#include "biomoe/core/tensor_view.h"
#include "biomoe/ops/op_list.h"
#include "biomoe/quant/scaling.h"

namespace biomoe {

// A weight's code in a block of 1x32, of the product that sums over columns, and its code in a block of 32x1
// stand for the same value, the weight rounded to three bits of mantissa, whatever the two scales: they are
// powers of two. All but where it is so small beside one of the blocks that its code there is subnormal, or
// so large that it saturates (ScaleRule::kMxFloor): of normal weights one in some ten thousand. So there is
// one copy, and what changes from one direction to the other is the few runs of 32 that differ.
// Of weights [E, O, I], E4M3, where O and I are multiples of 32; squares are of 32 x 32, from rows and
// columns that are multiples of 32 on.
struct MxWeights {
  static constexpr int64_t kBlock = 32;
  ScaleRule rule = ScaleRule::kMxUp;
  TensorView values_EOI{};        // of the weights' type: f32, on the GPU f32 or bf16
  TensorView column_scales_BI{};  // u8 E8M0 [E O / 32, I], of blocks of 32x1
  TensorView differ_BS{};         // i32 [E O / 32, I / 32]: bit r of a square is of what its row r has in it
  explicit operator bool() const { return static_cast<bool>(values_EOI); }
};

// Assigns all of `to`: values are those of blocks of 1x32, what quantize() gives as dequantized_RC.
struct WriteMxWeightsArgs {
  TensorView w_EOI;
  MxWeights to;
};

// Values become those of blocks of 32x1 (by_column) or of 1x32, whichever they are. `of` is of these weights.
struct TurnMxWeightsArgs {
  TensorView w_EOI;
  MxWeights of;  // values are updated
  bool by_column = false;
};

// Throws where the memory of `weights` is not as above for weights [experts, out, in] of `dtype`.
void check_mx_weights(const char* op, const MxWeights& weights, const Shape& shape_EOI, DType dtype);

}  // namespace biomoe
