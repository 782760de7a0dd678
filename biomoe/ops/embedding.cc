#include "biomoe/ops/embedding.h"

#include "biomoe/ops/check_args.h"
#include "biomoe/ops/dispatch_device.h"

namespace biomoe {
namespace {

void check_arguments(const char* op, const TensorView& tokens_T, const TensorView& weight_VD,
                     const TensorView& rows_TD) {
  check_rank(op, "tokens", tokens_T, 1);
  check_rank(op, "weight", weight_VD, 2);
  check_tensor(op, "tokens", tokens_T, DType::kI32, tokens_T.shape);
  check_tensor(op, "weight", weight_VD, DType::kF32, weight_VD.shape);
  check_tensor(op, "rows", rows_TD, DType::kF32, Shape{tokens_T.shape[0], weight_VD.shape[1]}, Layout::kRows);
}

}  // namespace

void embedding_forward(Context& ctx, const EmbeddingForwardArgs& args) {
  check_arguments("embedding_forward", args.tokens_T, args.weight_VD, args.y_TD);
  BIOMOE_RUN_ON_DEVICE(embedding_forward, ctx, args);
}

void embedding_backward(Context& ctx, const EmbeddingBackwardArgs& args) {
  check_arguments("embedding_backward", args.tokens_T, args.dweight_VD, args.dy_TD);
  BIOMOE_RUN_ON_DEVICE(embedding_backward, ctx, args);
}

}  // namespace biomoe
