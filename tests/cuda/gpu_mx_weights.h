// MxWeights in a GPU's memory, and what quantize() gives for the same weights.
#pragma once

#include "biomoe/ops/mx_weights.h"
#include "biomoe/ops/quantize.h"
#include "tests/cuda/gpu_test.h"

namespace biomoe::test {

struct GpuMxWeights {
  GpuMxWeights(Context& ctx, DType type, const Shape& shape, ScaleRule rule)
      : values(ctx, type, shape),
        column_scales(ctx, DType::kU8, Shape{shape[0] * shape[1] / 32, shape[2]}),
        differ(ctx, DType::kI32, Shape{shape[0] * shape[1] / 32, shape[2] / 32}) {
    view = {.rule = rule,
            .values_EOI = values.view(),
            .column_scales_BI = column_scales.view(),
            .differ_BS = differ.view()};
  }
  std::vector<std::vector<uint8_t>> bytes() {
    return {values.bytes(), column_scales.bytes(), differ.bytes()};
  }
  bool untouched() {
    return values.padding_untouched() && column_scales.padding_untouched() && differ.padding_untouched();
  }
  GpuTensor values, column_scales, differ;
  MxWeights view;
};

// In blocks of one row or of one column.
struct DirectMx {
  DirectMx(Context& ctx, const TensorView& w_EOI, ScaleRule rule, bool by_column)
      : values(ctx, w_EOI.dtype, w_EOI.shape),
        scales(ctx, DType::kU8,
               by_column ? Shape{w_EOI.shape[0] * w_EOI.shape[1] / 32, w_EOI.shape[2]}
                         : Shape{w_EOI.shape[0] * w_EOI.shape[1], w_EOI.shape[2] / 32}) {
    const Shape matrix{w_EOI.shape[0] * w_EOI.shape[1], w_EOI.shape[2]};
    QuantizeArgs args{.x_RC = TensorView(w_EOI.data, w_EOI.dtype, matrix), .rule = rule};
    args.block = by_column ? BlockShape{32, 1} : BlockShape{1, 32};
    args.scales_NB = scales.view();
    args.dequantized_RC = TensorView(values.view().data, w_EOI.dtype, matrix);
    quantize(ctx, args);
  }
  GpuTensor values, scales;
};

// The words of MxWeights::differ_BS.
inline std::vector<double> differing_runs(GpuTensor& rows, GpuTensor& columns) {
  const auto by_row = rows.bytes(), by_column = columns.bytes();
  const auto in = static_cast<size_t>(rows.view().shape[2]), elements = static_cast<size_t>(rows.size());
  const size_t element = dtype_size(rows.view().dtype);
  std::vector<uint32_t> words(elements / 1024);
  for (size_t i = 0; i < elements * element; ++i) {
    if (by_row[i] == by_column[i]) continue;
    const size_t row = i / element / in, column = i / element % in;
    words[row / 32 * (in / 32) + column / 32] |= 1u << row % 32;
  }
  std::vector<double> result;
  for (const uint32_t word : words) result.push_back(static_cast<double>(static_cast<int32_t>(word)));
  return result;
}

}  // namespace biomoe::test
