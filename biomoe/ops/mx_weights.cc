#include "biomoe/ops/mx_weights.h"

#include "biomoe/ops/check_args.h"
#include "biomoe/ops/dispatch_device.h"

namespace biomoe {

void check_mx_weights(const char* op, const MxWeights& weights, const Shape& shape_EOI, DType dtype) {
  constexpr int64_t kBlock = MxWeights::kBlock;
  BM_CHECK(shape_EOI.rank() == 3, "{}: weights {}, expected [experts, out, in]", op, shape_EOI.str());
  const int64_t out = shape_EOI[1], in = shape_EOI[2], bands = shape_EOI[0] * out / kBlock;
  BM_CHECK(out % kBlock == 0 && in % kBlock == 0, "{}: weights {} in blocks of {}", op, shape_EOI.str(),
           kBlock);
  BM_CHECK(is_mx(weights.rule), "{}: scales are powers of two", op);
  check_tensor(op, "values", weights.values_EOI, dtype, shape_EOI);
  check_tensor(op, "column_scales", weights.column_scales_BI, DType::kU8, Shape{bands, in});
  check_tensor(op, "differ", weights.differ_BS, DType::kI32, Shape{bands, in / kBlock});
}

namespace {

void check_weights(const char* op, const Context& ctx, const TensorView& w_EOI, const MxWeights& weights) {
  check_compute_type(op, "w", w_EOI, ctx.device);
  check_tensor(op, "w", w_EOI, w_EOI.dtype, w_EOI.shape);
  check_mx_weights(op, weights, w_EOI.shape, w_EOI.dtype);
}

}  // namespace

void write_mx_weights(Context& ctx, const WriteMxWeightsArgs& args) {
  check_weights("write_mx_weights", ctx, args.w_EOI, args.to);
  BIOMOE_RUN_ON_DEVICE(write_mx_weights, ctx, args);
}

void turn_mx_weights(Context& ctx, const TurnMxWeightsArgs& args) {
  check_weights("turn_mx_weights", ctx, args.w_EOI, args.of);
  BIOMOE_RUN_ON_DEVICE(turn_mx_weights, ctx, args);
}

}  // namespace biomoe
