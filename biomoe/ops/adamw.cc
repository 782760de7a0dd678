#include "biomoe/ops/adamw.h"

#include "biomoe/ops/check_args.h"
#include "biomoe/ops/dispatch_device.h"

namespace biomoe {
namespace {

void check_segments(const char* op, std::span<const ArenaSegment> segments, int64_t elements) {
  for (const ArenaSegment& segment : segments) {
    BM_CHECK(segment.begin >= 0 && segment.count >= 0 && segment.count <= elements &&
                 segment.begin <= elements - segment.count,
             "{}: the segment of {} elements from {} is outside the arena of {}", op, segment.count,
             segment.begin, elements);
  }
}

}  // namespace

void sum_squares(Context& ctx, const SumSquaresArgs& args) {
  constexpr const char* kOp = "sum_squares";
  check_rank(kOp, "x", args.x_A, 1);
  check_tensor(kOp, "x", args.x_A, DType::kF32, args.x_A.shape);
  check_tensor(kOp, "sums", args.sums_S, DType::kF64, Shape{static_cast<int64_t>(args.segments.size())});
  check_segments(kOp, args.segments, args.x_A.shape[0]);
  BIOMOE_RUN_ON_DEVICE(sum_squares, ctx, args);
}

void adamw(Context& ctx, const AdamwArgs& args) {
  constexpr const char* kOp = "adamw";
  check_rank(kOp, "param", args.param_A, 1);
  const Shape& shape = args.param_A.shape;
  check_tensor(kOp, "param", args.param_A, DType::kF32, shape);
  check_tensor(kOp, "grad", args.grad_A, DType::kF32, shape);
  check_tensor(kOp, "exp_avg", args.exp_avg_A, DType::kF32, shape);
  check_tensor(kOp, "exp_avg_sq", args.exp_avg_sq_A, DType::kF32, shape);
  check_segments(kOp, args.segments, shape[0]);
  BM_CHECK(args.step >= 1, "{}: step is {}, expected a number from 1", kOp, args.step);
  BM_CHECK(args.beta1 >= 0 && args.beta1 < 1 && args.beta2 >= 0 && args.beta2 < 1,
           "{}: beta1 = {} and beta2 = {}, expected numbers in [0, 1)", kOp, args.beta1, args.beta2);
  BIOMOE_RUN_ON_DEVICE(adamw, ctx, args);
}

}  // namespace biomoe
