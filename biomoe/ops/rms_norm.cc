#include "biomoe/ops/rms_norm.h"

#include "biomoe/ops/check_args.h"
#include "biomoe/ops/cuda_sizes.h"
#include "biomoe/ops/dispatch_device.h"

namespace biomoe {

void rms_norm_forward(Context& ctx, const RmsNormForwardArgs& args) {
  constexpr const char* kOp = "rms_norm_forward";
  check_rank(kOp, "x", args.x_TD, 2);
  const Shape& shape = args.x_TD.shape;
  const DType type = args.x_TD.dtype;
  check_compute_type(kOp, "x", args.x_TD, ctx.device);
  check_tensor(kOp, "x", args.x_TD, type, shape, Layout::kRows);
  check_tensor(kOp, "weight", args.weight_D, type, Shape{shape[1]});
  check_tensor(kOp, "y", args.y_TD, type, shape, Layout::kRows);
  check_tensor(kOp, "rstd", args.rstd_T, DType::kF32, Shape{shape[0]});
  if (args.residual_TD) {
    check_tensor(kOp, "residual", args.residual_TD, type, shape, Layout::kRows);
    check_tensor(kOp, "sum", args.sum_TD, type, shape, Layout::kRows);
  } else if (args.sum_TD) {
    check_tensor(kOp, "sum", args.sum_TD, type, shape, Layout::kRows);
  }
  BM_CHECK(args.eps >= 0, "{}: eps is {}, expected 0 or more", kOp, args.eps);
  BIOMOE_RUN_ON_DEVICE(rms_norm_forward, ctx, args);
}

void rms_norm_backward(Context& ctx, const RmsNormBackwardArgs& args) {
  constexpr const char* kOp = "rms_norm_backward";
  check_rank(kOp, "dy", args.dy_TD, 2);
  const Shape& shape = args.dy_TD.shape;
  const DType type = args.dy_TD.dtype;
  check_compute_type(kOp, "dy", args.dy_TD, ctx.device);
  check_compute_type(kOp, "dweight", args.dweight_D, ctx.device);
  check_tensor(kOp, "dy", args.dy_TD, type, shape, Layout::kRows);
  check_tensor(kOp, "sum", args.sum_TD, type, shape, Layout::kRows);
  check_tensor(kOp, "weight", args.weight_D, type, Shape{shape[1]});
  check_tensor(kOp, "rstd", args.rstd_T, DType::kF32, Shape{shape[0]});
  if (args.dresidual_TD) {
    check_tensor(kOp, "dresidual", args.dresidual_TD, type, shape, Layout::kRows);
  }
  check_tensor(kOp, "dx", args.dx_TD, type, shape, Layout::kRows);
  check_tensor(kOp, "dweight", args.dweight_D, args.dweight_D.dtype, Shape{shape[1]});
  BM_CHECK(ctx.scratch != nullptr, "{}: needs scratch memory", kOp);
  BIOMOE_RUN_ON_DEVICE(rms_norm_backward, ctx, args);
}

size_t rms_norm_backward_scratch_bytes(Device device, int64_t tokens, int64_t width) {
  if (device == Device::kCpu) return cpu::rms_norm_backward_scratch_bytes(tokens, width);
  return align_up(static_cast<size_t>(std::min(tokens, cuda::kRmsNormPartials) * width) * sizeof(float));
}

}  // namespace biomoe
