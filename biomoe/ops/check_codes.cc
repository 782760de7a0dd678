#include "biomoe/ops/check_codes.h"

#include "biomoe/core/error.h"
#include "biomoe/ops/check_args.h"
#include "biomoe/ops/cuda_sizes.h"
#include "biomoe/quant/mx_scale_layout.h"

namespace biomoe {

void check_codes(const char* op, Device device, const BlockScaledCodes& codes, int64_t rows, const Shape& w,
                 bool transposed) {
  if (!codes) return;
  BM_CHECK(device != Device::kCpu, "{}: the CPU multiplies no codes", op);
  BM_CHECK(w[1] % cuda::kScaleBlock == 0 && w[2] % cuda::kScaleBlock == 0,
           "{}: codes of weights {}, expected widths that are multiples of {}", op, w.str(),
           cuda::kScaleBlock);
  const int64_t n = transposed ? w[2] : w[1], k = transposed ? w[1] : w[2];
  check_tensor(op, "codes of rows", codes.rows_RK, DType::kU8, Shape{rows, k});
  check_tensor(op, "scales of rows", codes.row_scales_BR, DType::kF32,
               Shape{k / cuda::kScaleBlock, row_scales_stride(rows)});
  check_tensor(op, "codes of weights", codes.weights_ENK, DType::kU8, Shape{w[0], n, k});
  check_tensor(op, "scales of weights", codes.weight_scales_NB, DType::kF32,
               Shape{w[0] * (w[1] / cuda::kScaleBlock + 1), w[2] / cuda::kScaleBlock});
}

void check_column_codes(const char* op, Device device, const ColumnScaledCodes& codes, int64_t rows,
                        const Shape& w) {
  if (!codes) return;
  BM_CHECK(device != Device::kCpu, "{}: the CPU multiplies no codes", op);
  BM_CHECK(
      w[1] % cuda::kScaleBlock == 0 && w[2] % cuda::kScaleBlock == 0 && rows % cuda::kCodeRowAlignment == 0,
      "{}: codes of {} rows for weights {}, expected multiples of {} and widths of {}", op, rows, w.str(),
      cuda::kCodeRowAlignment, cuda::kScaleBlock);
  const int64_t blocks = (rows + cuda::kScaleBlock - 1) / cuda::kScaleBlock;
  check_tensor(op, "codes of y", codes.y_OR, DType::kU8, Shape{w[1], rows});
  check_tensor(op, "scales of y", codes.y_scales_BO, DType::kF32, Shape{blocks, w[1]});
  check_tensor(op, "codes of x", codes.x_IR, DType::kU8, Shape{w[2], rows});
  check_tensor(op, "scales of x", codes.x_scales_BI, DType::kF32, Shape{blocks, w[2]});
}

void check_mx_codes(const char* op, const MxCodes& codes, MxProduct product, int64_t rows, const Shape& w) {
  if (!codes) return;
  const int64_t experts = w[0], out = w[1], in = w[2];
  BM_CHECK(out % MxScaleLayout::kBlock == 0 && in % MxScaleLayout::kBlock == 0,
           "{}: MX codes of weights {}, expected widths that are multiples of {}", op, w.str(),
           MxScaleLayout::kBlock);
  const auto scales = [](int64_t matrices, int64_t lines, int64_t columns) {
    return Shape{matrices * MxScaleLayout::of(lines, columns).bytes()};
  };
  if (product == MxProduct::kWgrad) {
    BM_CHECK(rows % cuda::kCodeRowAlignment == 0, "{}: MX codes of {} rows, expected a multiple of {}", op,
             rows, cuda::kCodeRowAlignment);
    check_tensor(op, "codes of y", codes.a, DType::kU8, Shape{out, rows});
    check_tensor(op, "scales of y", codes.a_scales, DType::kU8, scales(1, out, rows));
    check_tensor(op, "codes of x", codes.b, DType::kU8, Shape{in, rows});
    check_tensor(op, "scales of x", codes.b_scales, DType::kU8, scales(1, in, rows));
    return;
  }
  const int64_t n = product == MxProduct::kForward ? out : in, k = product == MxProduct::kForward ? in : out;
  check_tensor(op, "codes of rows", codes.a, DType::kU8, Shape{rows, k});
  check_tensor(op, "scales of rows", codes.a_scales, DType::kU8, scales(1, rows, k));
  check_tensor(op, "codes of weights", codes.b, DType::kU8, Shape{experts, n, k});
  check_tensor(op, "scales of weights", codes.b_scales, DType::kU8, scales(experts, n, k));
}

}  // namespace biomoe
