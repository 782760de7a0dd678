#include "biomoe/ops/scaled_swiglu_codes.h"

#include <initializer_list>

#include "biomoe/ops/check_args.h"
#include "biomoe/ops/cuda_sizes.h"
#include "biomoe/ops/dispatch_device.h"

namespace biomoe {
namespace {

constexpr int64_t kBlock = cuda::kScaleBlock;

// Checks what both directions read; the width of act.
template <typename Args>
int64_t check_inputs(const char* op, const Args& args) {
  check_rank(op, "gate_up", args.gate_up_R2F, 2);
  check_rank(op, "offsets", args.offsets_E1, 1);
  const Shape& gate_up = args.gate_up_R2F.shape;
  BM_CHECK(gate_up[1] % (2 * kBlock) == 0, "{}: gate_up has {} columns, expected a multiple of {}", op,
           gate_up[1], 2 * kBlock);
  BM_CHECK(args.interleave == cuda::kGateUpInterleave, "{}: gate and up interleaved by {}, expected {}", op,
           args.interleave, cuda::kGateUpInterleave);
  BM_CHECK(!is_mx(args.rule) && args.rule != ScaleRule::kGiven, "{}: scales are fp32, of each block", op);
  BM_CHECK(args.offsets_E1.shape[0] >= 1, "{}: offsets is empty, expected the groups' borders", op);
  check_tensor(op, "gate_up", args.gate_up_R2F, DType::kBF16, gate_up);
  check_tensor(op, "probs", args.probs_R, DType::kF32, Shape{gate_up[0]});
  check_tensor(op, "offsets", args.offsets_E1, DType::kI64, args.offsets_E1.shape);
  return gate_up[1] / 2;
}

void check_row_codes(const char* op, const TensorView& codes, const TensorView& scales, int64_t rows,
                     int64_t columns) {
  check_tensor(op, "codes", codes, DType::kU8, Shape{rows, columns});
  check_tensor(op, "row_scales", scales, DType::kF32, Shape{columns / kBlock, row_scales_stride(rows)});
}

void check_column_codes(const char* op, const TensorView& codes, const TensorView& scales, int64_t rows,
                        int64_t columns) {
  check_tensor(op, "column_codes", codes, DType::kU8, Shape{columns, rows});
  check_tensor(op, "column_scales", scales, DType::kF32, Shape{(rows + kBlock - 1) / kBlock, columns});
}

void check_aligned(const char* op, std::initializer_list<TensorView> views) {
  constexpr uintptr_t kVectorBytes = 16;
  for (const TensorView& view : views) {
    BM_CHECK(reinterpret_cast<uintptr_t>(view.data) % kVectorBytes == 0,
             "{}: rows do not begin at multiples of {} bytes", op, kVectorBytes);
  }
}

}  // namespace

void scaled_swiglu_codes_forward(Context& ctx, const ScaledSwigluCodesForwardArgs& args) {
  constexpr const char* kOp = "scaled_swiglu_codes_forward";
  const int64_t width = check_inputs(kOp, args), rows = args.gate_up_R2F.shape[0];
  check_row_codes(kOp, args.act_codes_RF, args.act_row_scales_BR, rows, width);
  check_aligned(kOp, {args.gate_up_R2F, args.act_codes_RF});
  BIOMOE_RUN_ON_DEVICE(scaled_swiglu_codes_forward, ctx, args);
}

void scaled_swiglu_codes_backward(Context& ctx, const ScaledSwigluCodesBackwardArgs& args) {
  constexpr const char* kOp = "scaled_swiglu_codes_backward";
  const int64_t width = check_inputs(kOp, args), rows = args.gate_up_R2F.shape[0];
  BM_CHECK(rows % cuda::kCodeRowAlignment == 0, "{}: {} rows, expected a multiple of {}", kOp, rows,
           cuda::kCodeRowAlignment);
  check_tensor(kOp, "dact", args.dact_RF, DType::kBF16, Shape{rows, width});
  check_row_codes(kOp, args.dgate_up_codes_R2F, args.dgate_up_row_scales_BR, rows, 2 * width);
  check_column_codes(kOp, args.dgate_up_column_codes_2FR, args.dgate_up_column_scales_B2F, rows, 2 * width);
  check_column_codes(kOp, args.act_column_codes_FR, args.act_column_scales_BF, rows, width);
  check_tensor(kOp, "dprobs", args.dprobs_R, DType::kF32, Shape{rows});
  check_aligned(kOp, {args.gate_up_R2F, args.dact_RF, args.dgate_up_codes_R2F, args.dgate_up_column_codes_2FR,
                      args.act_column_codes_FR});
  BIOMOE_RUN_ON_DEVICE(scaled_swiglu_codes_backward, ctx, args);
}

}  // namespace biomoe
