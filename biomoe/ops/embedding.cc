#include "biomoe/ops/embedding.h"

#include "biomoe/ops/check_args.h"
#include "biomoe/ops/cuda_sizes.h"
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

size_t embedding_backward_scratch_bytes(Device device, int64_t tokens, int64_t vocabulary, int64_t width) {
  if (device == Device::kCpu || tokens == 0 || vocabulary == 0) return 0;
  const int64_t piece = cuda::embedding_piece_tokens(tokens);
  const auto pieces = static_cast<size_t>((tokens + piece - 1) / piece);
  return 2 * align_up(static_cast<size_t>(tokens) * sizeof(int32_t)) +
         align_up(2 * pieces * static_cast<size_t>(width) * sizeof(float)) +
         cuda::counting_sort_scratch_bytes(tokens, int64_t{1} << cuda::token_sort_digit_bits(vocabulary));
}

}  // namespace biomoe
