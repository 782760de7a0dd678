// Operands of products as 8-bit codes and their scales.
#pragma once

#include <cstdint>

#include "biomoe/core/tensor_view.h"

namespace biomoe {

// Columns of the scales of rows: as many as products, which read the scales of 128 rows at a time, want.
constexpr int64_t row_scales_stride(int64_t rows) {
  return (rows + 127) / 128 * 128;
}

// The operands of a product as E4M3 codes of recipe Float8BlockScaling, on a GPU of compute capability 9.0:
// rows [R, K], in blocks of 1x128, by weights [E, N, K], in blocks of 128x128, as quantize() writes them. N
// and K are multiples of 128. Codes stand in the place of the operands themselves, which then only tell
// shapes and types and are not read: rows may have no memory in a product of experts. Products of 128 columns
// are summed in the precision of the tensor cores, these sums in FP32 (docs/numerics.md).
struct BlockScaledCodes {
  TensorView rows_RK{};           // u8
  TensorView row_scales_BR{};     // f32 [K / 128, row_scales_stride(R)]
  TensorView weights_ENK{};       // u8; for a gradient of rows the transposed weights
  TensorView weight_scales_NB{};  // f32, of the weights as they lie: not transposed
  explicit operator bool() const { return static_cast<bool>(rows_RK); }
};

// The operands of a weight gradient as such codes, in blocks of 128 rows of one column, transposed: as
// quantize() writes them. `out` and `in` are multiples of 128, R of 16. Summed as above.
struct ColumnScaledCodes {
  TensorView y_OR{};         // u8
  TensorView y_scales_BO{};  // f32 [R / 128 rounded up, out]
  TensorView x_IR{};         // u8
  TensorView x_scales_BI{};  // f32 [R / 128 rounded up, in]
  explicit operator bool() const { return static_cast<bool>(y_OR); }
};

// The operands of d = a b^T as E4M3 codes of recipe MXFP8BlockScaling, on a GPU of compute capability 10.0,
// or as a reference for it on the CPU, in blocks of 32 along the sum, which is contiguous in both, with E8M0
// scales as quantize() writes them to mx_scales_S. Built, not yet run on such a GPU. Widths are multiples
// of 32. Sums are FP32.
//   forward              a: x [R, in], row-wise      b: w [E, out, in], row-wise
//   activation gradient  a: dy [R, out], row-wise    b: w^T [E, in, out], column-wise and transposed
//   weight gradient      a: dy^T [out, R]            b: x^T [in, R], both column-wise and transposed
enum class MxProduct { kForward, kDgrad, kWgrad };
struct MxCodes {
  TensorView a{};         // u8
  TensorView a_scales{};  // u8
  TensorView b{};         // u8
  TensorView b_scales{};  // u8
  explicit operator bool() const { return static_cast<bool>(a); }
};

}  // namespace biomoe
