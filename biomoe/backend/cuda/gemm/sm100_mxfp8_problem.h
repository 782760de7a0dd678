// What the MXFP8 products of experts on Blackwell (sm_100a) are asked for, and where each expert's part of
// them lies: arithmetic alone, for the host and the device, without headers of CUDA.
//
// Every product is d = a b^T of E4M3 codes in blocks of 32 along the sum, which is contiguous in both
// operands, with E8M0 scales laid out as MxScaleLayout has them. Rows are in expert order: expert e owns rows
// [offsets[e], offsets[e+1]), each offset a multiple of 128.
//
//   product            segments are  m    n    k    a                  b                   d
//   forward, y         rows of a          out  in   x [R, in]          w [E, out, in]      [R, out]
//   activation grad.   rows of a          in   out  dy [R, out]        w^T [E, in, out]    [R, in]
//   weight gradient    the sums      out  in        dy^T [out, R]      x^T [in, R]         dw [E, out, in]
#pragma once

#include <cstdint>

#include "biomoe/quant/mx_scale_layout.h"

namespace biomoe::cuda::sm100 {

inline constexpr int kMaxExperts = 256;
inline constexpr int64_t kSegmentRows = 128;  // offsets are multiples of this

// The scales are those of all rows that the codes have, and of each expert's weights apart, one expert's
// after the other's.
struct MxOperand {
  const uint8_t* codes = nullptr;   // 16-byte aligned
  const uint8_t* scales = nullptr;  // 128-byte aligned; padding zero
};

// What a segment of rows is to its expert's product.
enum class SegmentAxis : uint8_t { kRows, kSums };
enum class OutputType : uint8_t { kBf16, kFp32 };

struct GroupedProduct {
  SegmentAxis segments = SegmentAxis::kRows;
  int experts = 0;
  int64_t capacity = 0;              // R, rows of every row buffer
  const int64_t* offsets = nullptr;  // device [E + 1]; null: one expert, that has all rows
  int64_t m = 0, n = 0, k = 0;       // but for that along the segments, which is not read
  MxOperand a{}, b{};
  // Assigned, or with `accumulate` added to in FP32. Rows after the last segment are not written. kSums: an
  // expert without rows gets zeros, or keeps its d.
  void* d = nullptr;
  OutputType type = OutputType::kBf16;
  bool accumulate = false;
};

// The product of one expert, in elements from the beginning of codes, scales and d. A product without rows
// has m = 0.
struct ExpertProduct {
  int64_t m = 0, n = 0, k = 0;
  int64_t a_codes = 0, b_codes = 0, d = 0;
  int64_t a_scales = 0, b_scales = 0;
  int64_t a_stride = 0, b_stride = 0, d_stride = 0;          // from row to row
  int64_t a_scale_tile_stride = 0, b_scale_tile_stride = 0;  // MxScaleLayout::row_tile_stride()
};

// Rows [begin, end) are those of `expert`.
constexpr ExpertProduct expert_product(const GroupedProduct& product, int64_t expert, int64_t begin,
                                       int64_t end) {
  ExpertProduct part;
  part.n = product.n;
  if (product.segments == SegmentAxis::kRows) {
    const MxScaleLayout rows = MxScaleLayout::of(product.capacity, product.k);
    const MxScaleLayout weights = MxScaleLayout::of(product.n, product.k);
    part.m = end - begin;
    part.k = product.k;
    part.a_codes = begin * product.k;
    part.b_codes = expert * product.n * product.k;
    part.d = begin * product.n;
    part.a_scales = rows.offset(begin, 0);
    part.b_scales = expert * weights.bytes();
    part.a_stride = part.b_stride = product.k;
    part.a_scale_tile_stride = rows.row_tile_stride();
    part.b_scale_tile_stride = weights.row_tile_stride();
  } else {
    const MxScaleLayout a = MxScaleLayout::of(product.m, product.capacity);
    const MxScaleLayout b = MxScaleLayout::of(product.n, product.capacity);
    part.m = end > begin ? product.m : 0;
    part.k = end - begin;
    part.a_codes = part.b_codes = begin;
    part.d = expert * product.m * product.n;
    part.a_scales = a.offset(0, begin / MxScaleLayout::kBlock);
    part.b_scales = b.offset(0, begin / MxScaleLayout::kBlock);
    part.a_stride = part.b_stride = product.capacity;
    part.a_scale_tile_stride = a.row_tile_stride();
    part.b_scale_tile_stride = b.row_tile_stride();
  }
  part.d_stride = product.n;
  return part;
}

// Whether there are kernels for these sizes: widths that are whole blocks, rows of codes that begin at 16
// bytes, and extents that the 32-bit coordinates of tensor maps hold.
constexpr bool sizes_supported(const GroupedProduct& product) {
  constexpr int64_t kMaxExtent = int64_t{1} << 31;
  const bool rows = product.segments == SegmentAxis::kRows;
  const int64_t other = rows ? product.k : product.m;
  const auto width = [](int64_t size) {
    return size > 0 && size < kMaxExtent && size % MxScaleLayout::kBlock == 0;
  };
  return width(product.n) && width(other) && product.capacity >= 0 && product.capacity < kMaxExtent &&
         (rows || product.capacity % 16 == 0) && product.experts > 0 && product.experts <= kMaxExperts &&
         (product.offsets != nullptr || product.experts == 1);
}

}  // namespace biomoe::cuda::sm100
