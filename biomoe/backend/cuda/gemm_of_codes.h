#pragma once

#include "biomoe/core/context.h"
#include "biomoe/ops/gemm.h"

namespace biomoe::cuda {

// gemm() with codes: the products of experts, of one. Throws as they do where the GPU has none.
void gemm_of_codes(Context& ctx, const GemmArgs& args);

}  // namespace biomoe::cuda
