// Small operations on whole tensors.
#pragma once

#include "biomoe/core/tensor_view.h"
#include "biomoe/ops/op_list.h"

namespace biomoe {

// Every byte of the contiguous x becomes 0.
struct FillZeroArgs {
  TensorView x;
};

// count = elements of the contiguous x (f32 or bf16) that are NaN or infinite.
struct CountNonfiniteArgs {
  TensorView x;
  TensorView count_1;  // i64, assigned
};

}  // namespace biomoe
