#include "biomoe/ops/adamw.h"

#include "biomoe/ops/check_args.h"
#include "biomoe/ops/cuda_sizes.h"
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

void check_block_codes(const char* op, const WeightCodes& codes) {
  constexpr int64_t kBlock = cuda::kScaleBlock;
  check_rank(op, "codes", codes.codes_EOI, 3);
  const int64_t experts = codes.codes_EOI.shape[0], out = codes.codes_EOI.shape[1],
                in = codes.codes_EOI.shape[2];
  BM_CHECK(codes.rule == ScaleRule::kFloat || codes.rule == ScaleRule::kPowerOfTwo,
           "{}: codes of weights have fp32 scales", op);
  BM_CHECK(out % kBlock == 0 && in % kBlock == 0, "{}: codes of weights {} in blocks of {}x{}", op,
           codes.codes_EOI.shape.str(), kBlock, kBlock);
  check_tensor(op, "codes", codes.codes_EOI, DType::kU8, codes.codes_EOI.shape);
  if (codes.transposed_EIO) {
    check_tensor(op, "transposed", codes.transposed_EIO, DType::kU8, Shape{experts, in, out});
  }
  check_tensor(op, "scales", codes.scales_NB, DType::kF32, Shape{experts * (out / kBlock + 1), in / kBlock});
}

void check_codes(const char* op, const AdamwArgs& args, Device device) {
  BM_CHECK(args.codes.empty() || args.codes.size() == args.segments.size(),
           "{}: codes of {} segments, there are {}", op, args.codes.size(), args.segments.size());
  for (size_t i = 0; i < args.codes.size(); ++i) {
    const WeightCodes& codes = args.codes[i];
    if (!codes) continue;
    const Shape& shape = codes.mx ? codes.mx.values_EOI.shape : codes.codes_EOI.shape;
    BM_CHECK(device != Device::kCpu && args.weights_A.dtype == DType::kBF16,
             "{}: codes are written of bf16 weights on a GPU", op);
    BM_CHECK(args.segments[i].count == shape.num_elements() && args.segments[i].begin % 8 == 0,
             "{}: codes {} of a segment of {} elements from {}", op, shape.str(), args.segments[i].count,
             args.segments[i].begin);
    if (codes.mx) {
      check_mx_weights(op, codes.mx, shape, args.weights_A.dtype);
    } else {
      check_block_codes(op, codes);
    }
  }
}

}  // namespace

void sum_squares(Context& ctx, const SumSquaresArgs& args) {
  constexpr const char* kOp = "sum_squares";
  check_rank(kOp, "x", args.x_A, 1);
  check_compute_type(kOp, "x", args.x_A, ctx.device);
  check_tensor(kOp, "x", args.x_A, args.x_A.dtype, args.x_A.shape);
  check_tensor(kOp, "sums", args.sums_S, DType::kF64, Shape{static_cast<int64_t>(args.segments.size())});
  check_segments(kOp, args.segments, args.x_A.shape[0]);
  BM_CHECK(args.partials.empty() || args.partials.size() == args.segments.size(),
           "{}: partial sums of {} segments, there are {}", kOp, args.partials.size(), args.segments.size());
  for (const TensorView& partials : args.partials) {
    if (partials) check_tensor(kOp, "partials", partials, DType::kF32, Shape{partials.num_elements()});
  }
  BIOMOE_RUN_ON_DEVICE(sum_squares, ctx, args);
}

void clip_factor(Context& ctx, const ClipFactorArgs& args) {
  constexpr const char* kOp = "clip_factor";
  check_tensor(kOp, "sums", args.sums_S, DType::kF64, args.sums_S.shape);
  if (args.loss_sums_3) check_tensor(kOp, "loss_sums", args.loss_sums_3, DType::kF64, Shape{3});
  check_tensor(kOp, "norm", args.norm_1, DType::kF64, Shape{1});
  check_tensor(kOp, "factor", args.factor_1, DType::kF64, Shape{1});
  check_tensor(kOp, "apply", args.apply_1, DType::kF64, Shape{1});
  BM_CHECK(args.max_norm >= 0, "{}: max_norm is {}, expected 0 or more", kOp, args.max_norm);
  BIOMOE_RUN_ON_DEVICE(clip_factor, ctx, args);
}

void adamw(Context& ctx, const AdamwArgs& args) {
  constexpr const char* kOp = "adamw";
  check_rank(kOp, "weights", args.weights_A, 1);
  const Shape& shape = args.weights_A.shape;
  check_compute_type(kOp, "weights", args.weights_A, ctx.device);
  check_compute_type(kOp, "grad", args.grad_A, ctx.device);
  check_compute_type(kOp, "exp_avg", args.exp_avg_A, ctx.device);
  check_tensor(kOp, "weights", args.weights_A, args.weights_A.dtype, shape);
  if (args.master_A) check_tensor(kOp, "master", args.master_A, DType::kF32, shape);
  if (args.remainder_A) check_tensor(kOp, "remainder", args.remainder_A, DType::kU16, shape);
  BM_CHECK(!(args.master_A && args.remainder_A), "{}: both a master and a remainder", kOp);
  check_tensor(kOp, "grad", args.grad_A, args.grad_A.dtype, shape);
  check_tensor(kOp, "exp_avg", args.exp_avg_A, args.exp_avg_A.dtype, shape);
  check_tensor(kOp, "exp_avg_sq", args.exp_avg_sq_A, args.exp_avg_A.dtype, shape);
  check_tensor(kOp, "update", args.update_5, DType::kF64, Shape{kNumUpdateValues});
  check_segments(kOp, args.segments, shape[0]);
  check_codes(kOp, args, ctx.device);
  BM_CHECK(args.beta1 >= 0 && args.beta1 < 1 && args.beta2 >= 0 && args.beta2 < 1,
           "{}: beta1 = {} and beta2 = {}, expected numbers in [0, 1)", kOp, args.beta1, args.beta2);
  BIOMOE_RUN_ON_DEVICE(adamw, ctx, args);
}

size_t sum_squares_scratch_bytes(Device device, std::span<const ArenaSegment> segments) {
  if (device == Device::kCpu) return 0;
  size_t most = 0;
  for (size_t begin = 0; begin < segments.size(); begin += cuda::kSegmentsOfLaunch) {
    int64_t blocks = 0;
    for (const ArenaSegment& segment :
         segments.subspan(begin, std::min<size_t>(cuda::kSegmentsOfLaunch, segments.size() - begin))) {
      blocks += cuda::segment_blocks(segment.begin, segment.count, cuda::kSquaresBlockElements);
    }
    most = std::max(most, align_up(static_cast<size_t>(blocks) * sizeof(double)));
  }
  return most;
}

}  // namespace biomoe
