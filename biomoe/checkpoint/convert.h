// Arrays of one floating-point type into another. Sources and destinations in files need not be aligned.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "biomoe/core/dtype.h"

namespace biomoe {

bool is_float_type(DType dtype);  // F32, BF16 or F16: what weights come in

// `count` elements of `from` (F32, BF16, F16) at `source` -> fp32 (exact).
void convert_to_f32(DType from, const void* source, float* destination, size_t count);

// fp32 -> `to` (F32, BF16, F16), round to nearest even; infinities and NaN stay. Returns the place of the
// first finite element that is too large for `to`, if any.
std::optional<size_t> convert_from_f32(DType to, const float* source, void* destination, size_t count);

}  // namespace biomoe
