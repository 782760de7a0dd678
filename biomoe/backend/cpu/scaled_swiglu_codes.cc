#include "biomoe/ops/scaled_swiglu_codes.h"

#include "biomoe/core/error.h"

namespace biomoe::cpu {

void scaled_swiglu_codes_forward(Context&, const ScaledSwigluCodesForwardArgs&) {
  throw failure("scaled_swiglu_codes_forward: the CPU multiplies no codes");
}

void scaled_swiglu_codes_backward(Context&, const ScaledSwigluCodesBackwardArgs&) {
  throw failure("scaled_swiglu_codes_backward: the CPU multiplies no codes");
}

}  // namespace biomoe::cpu
