// Which rows are which expert's.
#pragma once

#include "biomoe/core/tensor_view.h"

namespace biomoe {

// Rows [offsets[e], offsets[e + 1]) are expert e's; where rows_E is given, only the first rows[e] of them
// hold something and the rest is padding that reads as zero. Rows from offsets[E] on are nobody's.
struct ExpertRows {
  TensorView offsets_E1;         // i64, on the device
  TensorView rows_E{};           // i32, on the device; the GPU's products of all experts at once need it
  TensorView offsets_host_E1{};  // the same as offsets_E1 where the host reads it; products of one expert at
                                 // a time need it off the CPU
  int64_t num_experts() const { return offsets_E1.shape[0] - 1; }
  const TensorView& host_offsets() const { return offsets_host_E1 ? offsets_host_E1 : offsets_E1; }
};

}  // namespace biomoe
