// Dense matrix product.
#pragma once

#include "biomoe/core/tensor_view.h"
#include "biomoe/ops/op_list.h"
#include "biomoe/ops/scaled_codes.h"

namespace biomoe {

// c = op(a) op(b)          accumulate = false (c is assigned, whatever it held, NaN included)
// c = c + op(a) op(b)      accumulate = true
// with op(a) [M, N'] etc. by transpose_*; views may have a row stride. Weights are stored [out, in], so a
// forward projection y = x W^T is transpose_b = true. An inner size of 0 gives zeros. Sums are fp32; a and b
// are of one type, and c may be f32 beside bf16 a and b.
//
// With codes, as grouped_gemm has them for one expert, c is the product of what they stand for; a and b then
// only tell shapes and types and are not read, and c has no row stride. `codes`: op(a) [M, K] are rows, b or
// its transpose the weights, not accumulated. `column_codes`: transpose_a; a is y and b is x, of rows that
// are a multiple of 16. `mx_codes`, in the place of both: of whichever of the three products it is.
struct GemmArgs {
  TensorView a;
  TensorView b;
  TensorView c;
  bool transpose_a = false;
  bool transpose_b = false;
  bool accumulate = false;
  BlockScaledCodes codes{};
  ColumnScaledCodes column_codes{};
  MxCodes mx_codes{};
};

// Which of the three products of MX codes a product is, and the shape of its weights.
struct MxGemm {
  MxProduct product = MxProduct::kForward;
  Shape weights_EOI;  // E is 1
};
MxGemm mx_gemm_of(const GemmArgs& args);

}  // namespace biomoe
