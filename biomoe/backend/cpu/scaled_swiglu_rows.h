// The activation over some rows on the calling thread, for products that go on with it while their rows are
// in cache. Arguments, and what is assigned, as in ops/scaled_swiglu.h; offsets_E1 is not read.
#pragma once

#include "biomoe/backend/cpu/parallel.h"
#include "biomoe/ops/scaled_swiglu.h"

namespace biomoe::cpu {

void scaled_swiglu_forward_rows(const ScaledSwigluForwardArgs& args, Range rows);
void scaled_swiglu_backward_rows(const ScaledSwigluBackwardArgs& args, Range rows);

}  // namespace biomoe::cpu
