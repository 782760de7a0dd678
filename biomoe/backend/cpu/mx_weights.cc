#include "biomoe/ops/mx_weights.h"

#include <array>

#include "biomoe/backend/cpu/parallel.h"

namespace biomoe::cpu {
namespace {

constexpr int64_t kBlock = MxWeights::kBlock;
constexpr Fp8Format kFormat = Fp8Format::kE4M3;

using Square = std::array<std::array<float, kBlock>, kBlock>;  // [row][column]
using Scales = std::array<BlockScale, kBlock>;

float magnitude(float x) {
  return std::bit_cast<float>(std::bit_cast<uint32_t>(x) & 0x7fffffffu);
}

float rounded(float x, const BlockScale& scale) {
  return fp8::decode(fp8::encode(x * scale.multiply, kFormat), kFormat) * scale.inverse;
}

Scales scales_of(const Square& square, bool by_column, ScaleRule rule) {
  Scales scales;
  for (size_t i = 0; i < kBlock; ++i) {
    float amax = 0.0f;
    for (size_t j = 0; j < kBlock; ++j) {
      const float value = magnitude(by_column ? square[j][i] : square[i][j]);
      amax = value > amax ? value : amax;  // false for NaN
    }
    scales[i] = block_scale(amax, kFormat, rule);
  }
  return scales;
}

// Squares of weights, by number.
class Squares {
 public:
  Squares(const TensorView& w_EOI, const MxWeights& of)
      : w_(w_EOI.f32()), of_(of), columns_(w_EOI.shape[2]), across_(columns_ / kBlock) {}

  int64_t count() const { return of_.differ_BS.num_elements(); }

  Square weights(int64_t square) const {
    Square result;
    for (int64_t r = 0; r < kBlock; ++r) {
      const float* row = w_ + offset(square) + r * columns_;
      std::copy_n(row, kBlock, result[static_cast<size_t>(r)].data());
    }
    return result;
  }
  float* values(int64_t square, int64_t row) const {
    return of_.values_EOI.f32() + offset(square) + row * columns_;
  }
  uint8_t* column_scales(int64_t square) const {
    return static_cast<uint8_t*>(of_.column_scales_BI.data) + square / across_ * columns_ +
           square % across_ * kBlock;
  }
  int32_t& differ(int64_t square) const { return static_cast<int32_t*>(of_.differ_BS.data)[square]; }

 private:
  int64_t offset(int64_t square) const {
    return square / across_ * kBlock * columns_ + square % across_ * kBlock;
  }

  const float* w_;
  const MxWeights& of_;
  int64_t columns_, across_;
};

constexpr int64_t kSquaresPerThread = 8;

}  // namespace

void write_mx_weights(Context& ctx, const WriteMxWeightsArgs& args) {
  const Squares squares(args.w_EOI, args.to);
  parallel_ranges(ctx, squares.count(), kSquaresPerThread, [&](Range range) {
    for (int64_t s = range.begin; s < range.end; ++s) {
      const Square w = squares.weights(s);
      const Scales rows = scales_of(w, false, args.to.rule), columns = scales_of(w, true, args.to.rule);
      for (size_t c = 0; c < kBlock; ++c) squares.column_scales(s)[c] = columns[c].e8m0;
      uint32_t differ = 0;
      for (size_t r = 0; r < kBlock; ++r) {
        float* values = squares.values(s, static_cast<int64_t>(r));
        for (size_t c = 0; c < kBlock; ++c) {
          values[c] = rounded(w[r][c], rows[r]);
          const float by_column = rounded(w[r][c], columns[c]);
          const bool same = std::bit_cast<uint32_t>(values[c]) == std::bit_cast<uint32_t>(by_column);
          differ |= same ? 0u : 1u << r;
        }
      }
      squares.differ(s) = static_cast<int32_t>(differ);
    }
  });
}

void turn_mx_weights(Context& ctx, const TurnMxWeightsArgs& args) {
  const Squares squares(args.w_EOI, args.of);
  parallel_ranges(ctx, squares.count(), kSquaresPerThread, [&](Range range) {
    for (int64_t s = range.begin; s < range.end; ++s) {
      const auto differ = static_cast<uint32_t>(squares.differ(s));
      if (differ == 0) continue;
      const Square w = squares.weights(s);
      const Scales rows = scales_of(w, false, args.of.rule);
      for (size_t r = 0; r < kBlock; ++r) {
        if ((differ >> r & 1u) == 0) continue;
        float* values = squares.values(s, static_cast<int64_t>(r));
        for (size_t c = 0; c < kBlock; ++c) {
          values[c] =
              rounded(w[r][c], args.by_column ? mx_block_scale(squares.column_scales(s)[c]) : rows[r]);
        }
      }
    }
  });
}

}  // namespace biomoe::cpu
