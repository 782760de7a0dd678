// Products of MX codes, by the kernels of sm_100a. Each throws user_error where this GPU or this build has
// none.
#pragma once

#include "biomoe/core/context.h"
#include "biomoe/ops/gemm.h"
#include "biomoe/ops/grouped_gemm.h"

namespace biomoe::cuda {

void mx_forward(Context& ctx, const GroupedGemmArgs& args);
void mx_dgrad(Context& ctx, const GroupedGemmArgs& args);
void mx_wgrad(Context& ctx, const GroupedGemmArgs& args);
// gemm(): the same of one expert that has all rows.
void mx_gemm(Context& ctx, const GemmArgs& args);

}  // namespace biomoe::cuda
