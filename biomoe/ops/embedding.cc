#include "biomoe/ops/embedding.h"

#include "biomoe/ops/check_args.h"
#include "biomoe/ops/dispatch_device.h"

namespace biomoe {
namespace {

void check_arguments(const char* op, Device device, const TensorView& tokens_T, const TensorView& weight_VD,
                     const TensorView& rows_TD) {
  check_rank(op, "tokens", tokens_T, 1);
  check_rank(op, "weight", weight_VD, 2);
  check_compute_type(op, "weight", weight_VD, device);
  check_compute_type(op, "rows", rows_TD, device);
  check_tensor(op, "tokens", tokens_T, DType::kI32, tokens_T.shape);
  check_tensor(op, "weight", weight_VD, weight_VD.dtype, weight_VD.shape);
  check_tensor(op, "rows", rows_TD, rows_TD.dtype, Shape{tokens_T.shape[0], weight_VD.shape[1]},
               Layout::kRows);
}

}  // namespace

void embedding_forward(Context& ctx, const EmbeddingForwardArgs& args) {
  check_arguments("embedding_forward", ctx.device, args.tokens_T, args.weight_VD, args.y_TD);
  BIOMOE_RUN_ON_DEVICE(embedding_forward, ctx, args);
}

void embedding_backward(Context& ctx, const EmbeddingBackwardArgs& args) {
  check_arguments("embedding_backward", ctx.device, args.tokens_T, args.dweight_VD, args.dy_TD);
  BIOMOE_RUN_ON_DEVICE(embedding_backward, ctx, args);
}

}  // namespace biomoe
