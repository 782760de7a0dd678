#include "biomoe/ops/router.h"

#include "biomoe/ops/check_args.h"
#include "biomoe/ops/cuda_sizes.h"
#include "biomoe/ops/dispatch_device.h"

namespace biomoe {
namespace {

struct RouterSizes {
  int64_t tokens;
  int64_t num_experts;
  int64_t top_k;
};

RouterSizes check_sizes(const char* op, const TensorView& rows_TE, const TensorView& experts_Tk) {
  check_rank(op, "logits or probs", rows_TE, 2);
  check_rank(op, "experts", experts_Tk, 2);
  const RouterSizes sizes{rows_TE.shape[0], rows_TE.shape[1], experts_Tk.shape[1]};
  BM_CHECK(sizes.top_k >= 1 && sizes.top_k <= sizes.num_experts,
           "{}: top_k is {}, expected a number from 1 to the {} experts", op, sizes.top_k, sizes.num_experts);
  return sizes;
}

}  // namespace

void router_forward(Context& ctx, const RouterForwardArgs& args) {
  constexpr const char* kOp = "router_forward";
  const RouterSizes sizes = check_sizes(kOp, args.logits_TE, args.experts_Tk);
  const Shape rows{sizes.tokens, sizes.num_experts};
  const Shape selected{sizes.tokens, sizes.top_k};
  check_tensor(kOp, "logits", args.logits_TE, DType::kF32, rows, Layout::kRows);
  check_tensor(kOp, "probs", args.probs_TE, DType::kF32, rows, Layout::kRows);
  check_tensor(kOp, "experts", args.experts_Tk, DType::kI32, selected);
  check_tensor(kOp, "weights", args.weights_Tk, DType::kF32, selected);
  check_tensor(kOp, "lse", args.lse_T, DType::kF32, Shape{sizes.tokens});
  check_tensor(kOp, "counts", args.counts_E, DType::kI64, Shape{sizes.num_experts});
  check_tensor(kOp, "prob_sums", args.prob_sums_E, DType::kF64, Shape{sizes.num_experts});
  check_tensor(kOp, "z_sum", args.z_sum_1, DType::kF64, Shape{1});
  BIOMOE_RUN_ON_DEVICE(router_forward, ctx, args);
}

void router_backward(Context& ctx, const RouterBackwardArgs& args) {
  constexpr const char* kOp = "router_backward";
  const RouterSizes sizes = check_sizes(kOp, args.probs_TE, args.experts_Tk);
  const Shape rows{sizes.tokens, sizes.num_experts};
  const Shape selected{sizes.tokens, sizes.top_k};
  check_tensor(kOp, "probs", args.probs_TE, DType::kF32, rows, Layout::kRows);
  check_tensor(kOp, "experts", args.experts_Tk, DType::kI32, selected);
  check_tensor(kOp, "weights", args.weights_Tk, DType::kF32, selected);
  check_tensor(kOp, "lse", args.lse_T, DType::kF32, Shape{sizes.tokens});
  check_tensor(kOp, "dweights", args.dweights_Tk, DType::kF32, selected);
  if (args.balance_E) check_tensor(kOp, "balance", args.balance_E, DType::kF32, Shape{sizes.num_experts});
  check_compute_type(kOp, "dlogits", args.dlogits_TE, ctx.device);
  check_tensor(kOp, "dlogits", args.dlogits_TE, args.dlogits_TE.dtype, rows, Layout::kRows);
  BIOMOE_RUN_ON_DEVICE(router_backward, ctx, args);
}

void balance_loss(Context& ctx, const BalanceLossArgs& args) {
  constexpr const char* kOp = "balance_loss";
  check_rank(kOp, "counts", args.counts_LE, 2);
  const Shape& shape = args.counts_LE.shape;
  check_tensor(kOp, "counts", args.counts_LE, DType::kI64, shape);
  check_tensor(kOp, "prob_sums", args.prob_sums_LE, DType::kF64, shape);
  check_tensor(kOp, "z_sums", args.z_sums_L, DType::kF64, Shape{shape[0]});
  check_tensor(kOp, "losses", args.losses_2, DType::kF64, Shape{2});
  check_tensor(kOp, "balance", args.balance_LE, DType::kF32, shape);
  BM_CHECK(args.tokens >= 0, "{}: {} tokens", kOp, args.tokens);
  BIOMOE_RUN_ON_DEVICE(balance_loss, ctx, args);
}

size_t router_forward_scratch_bytes(Device device, int64_t tokens, int64_t experts) {
  if (device == Device::kCpu) return 0;
  const int64_t block = cuda::router_block_tokens(tokens);
  return align_up(static_cast<size_t>((tokens + block - 1) / block * (experts + 1)) * sizeof(double));
}

}  // namespace biomoe
