// Products of MX codes on the CPU: a reference for those of a GPU, in FP32 on what the codes stand for, which
// is decoded into memory of its own. Training on the CPU does not call it.
#pragma once

#include <vector>

#include "biomoe/ops/scaled_codes.h"

namespace biomoe::cpu {

// Both operands as they lie where there are no codes: rows [R, k] (of a weight gradient dy [R, out]), and
// weights [E, out, in] (or x [R, in]).
struct DecodedMx {
  std::vector<float> a, b;
};
// `w` is [E, out, in].
DecodedMx decode_mx(const MxCodes& codes, MxProduct product, int64_t rows, const Shape& w);

}  // namespace biomoe::cpu
