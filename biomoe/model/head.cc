#include "biomoe/model/head.h"

#include <algorithm>

#include "biomoe/ops/cross_entropy.h"
#include "biomoe/ops/fill.h"
#include "biomoe/ops/gemm.h"

namespace biomoe {

int64_t head_chunk_rows(Device device, int64_t vocab_size) {
  const int64_t elements = int64_t{1} << (device == Device::kCpu ? 21 : 27);
  return std::clamp<int64_t>(elements / vocab_size, 64, device == Device::kCpu ? 4096 : 16384);
}

HeadWorkspace allocate_head_workspace(TensorAllocator& allocator, Device device, DType type,
                                      int64_t vocab_size, int64_t tokens) {
  HeadWorkspace workspace;
  workspace.logits_CV =
      allocator.tensor(type, {std::min(tokens, head_chunk_rows(device, vocab_size)), vocab_size});
  workspace.nll_T = allocator.tensor(DType::kF32, {tokens});
  return workspace;
}

void head_loss(Context& ctx, const HeadArgs& args, const HeadWorkspace& workspace) {
  const int64_t tokens = args.x_TD.shape[0];
  const int64_t chunk = std::max<int64_t>(1, workspace.logits_CV.shape[0]);
  for (int64_t begin = 0; begin < tokens; begin += chunk) {
    const int64_t rows = std::min(chunk, tokens - begin);
    const TensorView x = args.x_TD.rows(begin, rows);
    const TensorView logits = workspace.logits_CV.rows(0, rows);
    head_logits(ctx, x, args.weight_VD, logits);
    cross_entropy(ctx, {.logits_TV = logits,
                        .targets_T = args.targets_T.rows(begin, rows),
                        .weights_T = args.weights_T.rows(begin, rows),
                        .nll_T = workspace.nll_T.rows(begin, rows),
                        .grad_scale_1 = args.grad_scale_1,
                        .write_gradient = static_cast<bool>(args.dx_TD)});
    if (!args.dx_TD) continue;
    gemm(ctx, {.a = logits, .b = args.weight_VD, .c = args.dx_TD.rows(begin, rows)});
    gemm(ctx, {.a = logits,
               .b = x,
               .c = args.dweight_VD,
               .transpose_a = true,
               .accumulate = args.accumulate || begin > 0});
  }
  if (tokens == 0 && args.dx_TD && !args.accumulate) fill_zero(ctx, {.x = args.dweight_VD});
}

void head_logits(Context& ctx, TensorView x_TD, TensorView weight_VD, TensorView logits_TV) {
  gemm(ctx, {.a = x_TD, .b = weight_VD, .c = logits_TV, .transpose_b = true});
}

}  // namespace biomoe
