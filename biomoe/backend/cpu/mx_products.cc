#include "biomoe/backend/cpu/mx_products.h"

#include "biomoe/quant/formats.h"
#include "biomoe/quant/mx_scale_layout.h"

namespace biomoe::cpu {
namespace {

// Codes of [matrices, lines, sum], as matrices or each transposed.
std::vector<float> decode(const TensorView& codes, const TensorView& scales, int64_t matrices, int64_t lines,
                          int64_t sum, bool transpose) {
  const MxScaleLayout layout = MxScaleLayout::of(lines, sum);
  const auto* code = static_cast<const uint8_t*>(codes.data);
  const auto* scale = static_cast<const uint8_t*>(scales.data);
  std::vector<float> to(static_cast<size_t>(matrices * lines * sum));
  for (int64_t m = 0; m < matrices; ++m) {
    for (int64_t line = 0; line < lines; ++line) {
      for (int64_t k = 0; k < sum; ++k) {
        const int64_t from = (m * lines + line) * sum + k;
        const int64_t at = transpose ? (m * sum + k) * lines + line : from;
        const uint8_t e = scale[m * layout.bytes() + layout.offset(line, k / MxScaleLayout::kBlock)];
        to[static_cast<size_t>(at)] = fp8::decode(code[from], Fp8Format::kE4M3) * e8m0::decode(e);
      }
    }
  }
  return to;
}

}  // namespace

DecodedMx decode_mx(const MxCodes& codes, MxProduct product, int64_t rows, const Shape& w) {
  const int64_t experts = w[0], out = w[1], in = w[2];
  switch (product) {
    case MxProduct::kForward:
      return {decode(codes.a, codes.a_scales, 1, rows, in, false),
              decode(codes.b, codes.b_scales, experts, out, in, false)};
    case MxProduct::kDgrad:
      return {decode(codes.a, codes.a_scales, 1, rows, out, false),
              decode(codes.b, codes.b_scales, experts, in, out, true)};
    default:
      return {decode(codes.a, codes.a_scales, 1, out, rows, true),
              decode(codes.b, codes.b_scales, 1, in, rows, true)};
  }
}

}  // namespace biomoe::cpu
