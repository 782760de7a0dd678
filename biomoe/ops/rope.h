// Rotary position embedding (Su et al., 2021) in the half-split layout of `transformers`: element i of a head
// pairs with element i + K/2.
#pragma once

#include "biomoe/core/tensor_view.h"
#include "biomoe/ops/op_list.h"

namespace biomoe {

// Rotates the first num_heads heads of each row of x in place; inverse = true applies the transpose
// (backward).
struct RopeArgs {
  TensorView x_TC;         // [T, C], C >= num_heads * head_dim
  TensorView positions_T;  // i32, in [0, S)
  TensorView cos_SK2;      // f32 [S, K/2]
  TensorView sin_SK2;
  int64_t num_heads = 0;
  int64_t head_dim = 0;
  bool inverse = false;
};

// Fills the tables for positions [0, S) as `transformers` does: inverse frequencies and angles rounded to
// fp32. frequency_dtype BF16 or F16 rounds the inverse frequencies further: a `transformers` model cast as a
// whole, by model.to(torch.bfloat16), computes with such ones (from_pretrained keeps them in fp32).
void fill_rope_tables(double theta, int64_t head_dim, TensorView cos_SK2, TensorView sin_SK2,
                      DType frequency_dtype = DType::kF32);

}  // namespace biomoe
