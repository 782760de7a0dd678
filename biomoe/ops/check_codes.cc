#include "biomoe/ops/check_codes.h"

#include "biomoe/core/error.h"
#include "biomoe/ops/check_args.h"
#include "biomoe/ops/cuda_sizes.h"

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

}  // namespace biomoe
