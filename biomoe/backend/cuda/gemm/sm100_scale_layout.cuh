// MxScaleLayout in CUTLASS's terms.
#pragma once

#include <cutlass/cutlass.h>
#include <cute/tensor.hpp>
#include <cutlass/detail/sm100_blockscaled_layout.hpp>

#include "biomoe/quant/mx_scale_layout.h"

namespace biomoe::cuda::sm100 {

using ScaleConfig = cutlass::detail::Sm1xxBlockScaledConfig<static_cast<int>(MxScaleLayout::kBlock)>;

// Of an operand of rows x k that is part of a larger one, whose tiles of rows are `tile_stride` bytes apart.
CUTE_HOST_DEVICE ScaleConfig::LayoutSF scale_layout(int rows, int k, int64_t tile_stride) {
  // Operands a and b have one layout: the other one's rows do not matter to it.
  ScaleConfig::LayoutSF layout = ScaleConfig::tile_atom_to_shape_SFA(cute::make_shape(rows, 0, k, 1));
  cute::get<1>(cute::get<0>(layout.stride())) = static_cast<int32_t>(tile_stride);
  return layout;
}

}  // namespace biomoe::cuda::sm100
