// Checks of operands that are codes; they throw failure, naming the op. Absent codes are fine.
#pragma once

#include "biomoe/core/context.h"
#include "biomoe/ops/scaled_codes.h"

namespace biomoe {

// For weights w[e] of [out, in]; `transposed`: their codes are [in, out].
void check_codes(const char* op, Device device, const BlockScaledCodes& codes, int64_t rows, const Shape& w,
                 bool transposed);
void check_column_codes(const char* op, Device device, const ColumnScaledCodes& codes, int64_t rows,
                        const Shape& w);
// Of a product over experts with rows [R, in] or [R, out] and weights [E, out, in].
void check_mx_codes(const char* op, const MxCodes& codes, MxProduct product, int64_t rows, const Shape& w);

}  // namespace biomoe
