// Dense matrix product.
#pragma once

#include "biomoe/core/tensor_view.h"
#include "biomoe/ops/op_list.h"

namespace biomoe {

// c = op(a) op(b)          accumulate = false (c is assigned, whatever it held, NaN included)
// c = c + op(a) op(b)      accumulate = true
// with op(a) [M, N'] etc. by transpose_*; views may have a row stride. Weights are stored [out, in], so a
// forward projection y = x W^T is transpose_b = true. An inner size of 0 gives zeros. Sums are fp32; a and b
// are of one type, and c may be f32 beside bf16 a and b.
struct GemmArgs {
  TensorView a;
  TensorView b;
  TensorView c;
  bool transpose_a = false;
  bool transpose_b = false;
  bool accumulate = false;
};

}  // namespace biomoe
