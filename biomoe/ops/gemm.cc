#include "biomoe/ops/gemm.h"

#include "biomoe/ops/check_args.h"
#include "biomoe/ops/check_codes.h"
#include "biomoe/ops/dispatch_device.h"

namespace biomoe {
namespace {

void check_mx_operands(const char* op, const GemmArgs& args) {
  if (!args.mx_codes) return;
  BM_CHECK(!args.codes && !args.column_codes && !(args.transpose_a && args.transpose_b),
           "{}: MX codes beside others, or in a product of two transposes", op);
  const MxGemm mx = mx_gemm_of(args);
  check_mx_codes(op, args.mx_codes, mx.product, args.a.shape[0], mx.weights_EOI);
}

void check_operand_codes(const char* op, Device device, const GemmArgs& args) {
  if (!args.codes && !args.column_codes) return;
  BM_CHECK(!args.codes || (!args.transpose_a && !args.accumulate && !args.column_codes),
           "{}: codes of rows and weights, in a product that is no projection or gradient of its rows", op);
  BM_CHECK(!args.column_codes || (args.transpose_a && !args.transpose_b),
           "{}: codes by column, in a product that is no weight gradient", op);
  BM_CHECK(args.c.contiguous(), "{}: c {} with a row stride of {}", op, args.c.shape.str(),
           args.c.row_stride);
  const Shape& b = args.b.shape;
  check_codes(op, device, args.codes, args.a.shape[0], Shape{1, b[0], b[1]}, !args.transpose_b);
  check_column_codes(op, device, args.column_codes, args.a.shape[0], Shape{1, args.a.shape[1], b[1]});
}

}  // namespace

MxGemm mx_gemm_of(const GemmArgs& args) {
  const Shape &a = args.a.shape, &b = args.b.shape;
  if (args.transpose_a) return {MxProduct::kWgrad, Shape{1, a[1], b[1]}};
  return {args.transpose_b ? MxProduct::kForward : MxProduct::kDgrad, Shape{1, b[0], b[1]}};
}

void gemm(Context& ctx, const GemmArgs& args) {
  constexpr const char* kOp = "gemm";
  check_rank(kOp, "a", args.a, 2);
  check_rank(kOp, "b", args.b, 2);
  check_rank(kOp, "c", args.c, 2);
  const int64_t rows = args.a.shape[args.transpose_a ? 1 : 0];
  const int64_t inner = args.a.shape[args.transpose_a ? 0 : 1];
  const int64_t columns = args.b.shape[args.transpose_b ? 0 : 1];
  check_compute_type(kOp, "a", args.a, ctx.device);
  check_compute_type(kOp, "c", args.c, ctx.device);
  check_tensor(kOp, "a", args.a, args.a.dtype, args.a.shape, Layout::kRows);
  check_tensor(kOp, "b", args.b, args.a.dtype,
               args.transpose_b ? Shape{columns, inner} : Shape{inner, columns}, Layout::kRows);
  check_tensor(kOp, "c", args.c, args.c.dtype, Shape{rows, columns}, Layout::kRows);
  check_operand_codes(kOp, ctx.device, args);
  check_mx_operands(kOp, args);
  BIOMOE_RUN_ON_DEVICE(gemm, ctx, args);
}

}  // namespace biomoe
