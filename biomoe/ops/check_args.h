// Validation shared by the operations. A wrong argument is an error of the program, so Error(kFailure) is
// thrown, naming the operation, the argument, what was expected and what was given.
#pragma once

#include "biomoe/core/context.h"
#include "biomoe/core/tensor_view.h"

namespace biomoe {

// kRows: consecutive rows may be further apart than their elements (a column band of a wider matrix).
// kShapeOnly: something else stands in the place of the elements, which may have no memory.
enum class Layout { kContiguous, kRows, kShapeOnly };

// `view` must hold `shape` elements of `dtype` in `layout`, and memory unless it has no elements.
void check_tensor(const char* op, const char* argument, const TensorView& view, DType dtype,
                  const Shape& shape, Layout layout = Layout::kContiguous);

// `view` must be of fp32 or, where ctx is not the CPU, of bf16: the type that activations and weights are
// computed in.
void check_compute_type(const char* op, const char* argument, const TensorView& view, Device device);

// `view` must have `rank` axes; called before its sizes are used to check the other arguments.
void check_rank(const char* op, const char* argument, const TensorView& view, int rank);

// Every one of the contiguous host-readable `ids` must be in [low, high).
void check_ids(const char* op, const char* argument, const TensorView& ids, int64_t low, int64_t high);

}  // namespace biomoe
