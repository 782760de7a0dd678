#include "biomoe/ops/scaled_swiglu_codes.h"

#include <initializer_list>

#include "biomoe/ops/check_args.h"
#include "biomoe/ops/cuda_sizes.h"
#include "biomoe/ops/dispatch_device.h"
#include "biomoe/quant/compact_bf16.h"

namespace biomoe {
namespace {

constexpr int64_t kBlock = cuda::kScaleBlock;

// Checks what both directions take, for act of [rows, width].
template <typename Args>
void check_inputs(const char* op, const Args& args, int64_t rows, int64_t width) {
  check_rank(op, "offsets", args.offsets_E1, 1);
  BM_CHECK(width % kBlock == 0, "{}: act has {} columns, expected a multiple of {}", op, width, kBlock);
  BM_CHECK(args.interleave == cuda::kGateUpInterleave, "{}: gate and up interleaved by {}, expected {}", op,
           args.interleave, cuda::kGateUpInterleave);
  BM_CHECK(!is_mx(args.rule) && args.rule != ScaleRule::kGiven, "{}: scales are fp32, of each block", op);
  BM_CHECK(args.offsets_E1.shape[0] >= 1, "{}: offsets is empty, expected the groups' borders", op);
  check_tensor(op, "probs", args.probs_R, DType::kF32, Shape{rows});
  check_tensor(op, "offsets", args.offsets_E1, DType::kI64, args.offsets_E1.shape);
}

void check_kept(const char* op, const TensorView& kept, int64_t rows, int64_t width) {
  BM_CHECK(rows % CompactLayout::kGroupRows == 0, "{}: {} rows, expected a multiple of {} to keep", op, rows,
           CompactLayout::kGroupRows);
  check_tensor(op, "kept", kept, DType::kU8, Shape{rows, CompactLayout::row_bytes(width)});
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
  check_rank(kOp, "gate_up", args.gate_up_R2F, 2);
  const int64_t rows = args.gate_up_R2F.shape[0], width = args.gate_up_R2F.shape[1] / 2;
  check_inputs(kOp, args, rows, width);
  check_tensor(kOp, "gate_up", args.gate_up_R2F, DType::kBF16, Shape{rows, 2 * width});
  check_row_codes(kOp, args.act_codes_RF, args.act_row_scales_BR, rows, width);
  if (args.kept_RC) check_kept(kOp, args.kept_RC, rows, width);
  check_aligned(kOp, {args.gate_up_R2F, args.act_codes_RF, args.kept_RC});
  BIOMOE_RUN_ON_DEVICE(scaled_swiglu_codes_forward, ctx, args);
}

void scaled_swiglu_codes_backward(Context& ctx, const ScaledSwigluCodesBackwardArgs& args) {
  constexpr const char* kOp = "scaled_swiglu_codes_backward";
  check_rank(kOp, "dact", args.dact_RF, 2);
  const int64_t rows = args.dact_RF.shape[0], width = args.dact_RF.shape[1];
  check_inputs(kOp, args, rows, width);
  BM_CHECK(rows % cuda::kCodeRowAlignment == 0, "{}: {} rows, expected a multiple of {}", kOp, rows,
           cuda::kCodeRowAlignment);
  check_tensor(kOp, "dact", args.dact_RF, DType::kBF16, Shape{rows, width});
  check_kept(kOp, args.kept_RC, rows, width);
  check_row_codes(kOp, args.dgate_up_codes_R2F, args.dgate_up_row_scales_BR, rows, 2 * width);
  check_column_codes(kOp, args.dgate_up_column_codes_2FR, args.dgate_up_column_scales_B2F, rows, 2 * width);
  check_column_codes(kOp, args.act_column_codes_FR, args.act_column_scales_BF, rows, width);
  check_tensor(kOp, "dprobs", args.dprobs_R, DType::kF32, Shape{rows});
  check_aligned(kOp, {args.kept_RC, args.dact_RF, args.dgate_up_codes_R2F, args.dgate_up_column_codes_2FR,
                      args.act_column_codes_FR});
  BIOMOE_RUN_ON_DEVICE(scaled_swiglu_codes_backward, ctx, args);
}

}  // namespace biomoe
