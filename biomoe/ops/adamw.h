// AdamW (Loshchilov and Hutter, 2019) over flat arenas, and the reduction behind gradient clipping.
#pragma once

#include <cstdint>
#include <span>

#include "biomoe/core/tensor_view.h"
#include "biomoe/ops/op_list.h"

namespace biomoe {

// A contiguous run of elements in flat arenas.
struct ArenaSegment {
  int64_t begin = 0;
  int64_t count = 0;
  bool decay = false;  // weight decay applies
};

// sums[i] = sum of x^2 over segments[i], in fp64, in an order that does not depend on the number of threads.
struct SumSquaresArgs {
  TensorView x_A;  // flat
  std::span<const ArenaSegment> segments;
  TensorView sums_S;  // f64 [segments], assigned
};

// For every element of every segment, with g = grad * grad_scale:
//   param -= lr * weight_decay * param  (where decay);  m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2;
//   param -= lr * (m / (1 - b1^step)) / (sqrt(v / (1 - b2^step)) + eps)
struct AdamwArgs {
  TensorView param_A;  // flat fp32 arenas, updated in place
  TensorView grad_A;   // read
  TensorView exp_avg_A;
  TensorView exp_avg_sq_A;
  std::span<const ArenaSegment> segments;
  double lr = 0;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0;
  double grad_scale = 1.0;  // the clip factor
  int64_t step = 1;         // from 1
};

}  // namespace biomoe
