// Quantisation of a whole matrix in double precision.
#pragma once

#include "biomoe/quant/block_grid.h"
#include "biomoe/quant/scaling.h"
#include "tests/ref/fp8.h"

namespace biomoe::ref {

struct Quantized {
  std::vector<uint8_t> codes;
  std::vector<double> values;  // what the codes stand for, in fp32
  std::vector<double> scales;  // E8M0 bytes, or what codes are multiplied with; -1: of no block
  std::vector<double> amax;    // of each block, 0 where there is none
};

struct QuantizeProblem {
  int64_t rows, columns;
  std::vector<int64_t> offsets;  // of the groups; {0, rows} when there is one
  bool grouped;
  Fp8Format format;
  ScaleRule rule;
  BlockShape block;
  std::vector<double> given{};  // kGiven: scale of each group
};

// Where the blocks' scales lie is written out here again, from the text in BlockGrid.
inline Quantized quantize(const std::vector<double>& x, const QuantizeProblem& p) {
  const Fp8& format = p.format == Fp8Format::kE4M3 ? kE4m3 : kE5m2;
  const auto groups = static_cast<int64_t>(p.offsets.size()) - 1;
  const int64_t block_columns =
      p.block.columns == 0 ? (p.columns > 0 ? 1 : 0) : (p.columns + p.block.columns - 1) / p.block.columns;
  const int64_t bands = p.block.rows == 0 ? groups
                        : p.grouped       ? p.rows / p.block.rows + groups
                                          : (p.rows + p.block.rows - 1) / p.block.rows;
  Quantized out{std::vector<uint8_t>(x.size(), 0xff), std::vector<double>(x.size(), std::nan("")),
                std::vector<double>(static_cast<size_t>(bands * block_columns), -1.0),
                std::vector<double>(static_cast<size_t>(bands * block_columns), 0.0)};
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t begin = p.offsets[static_cast<size_t>(g)], end = p.offsets[static_cast<size_t>(g) + 1];
    const int64_t step = p.block.rows == 0 ? std::max<int64_t>(1, end - begin) : p.block.rows;
    const int64_t width = p.block.columns == 0 ? p.columns : p.block.columns;
    for (int64_t r = begin; r < end; r += step) {
      const int64_t first = p.block.rows == 0 ? g : (p.grouped ? begin / p.block.rows + g : 0);
      const int64_t band = first + (r - begin) / step;
      for (int64_t c = 0; c < p.columns; c += width) {
        std::vector<size_t> places;
        std::vector<double> values;
        for (int64_t i = r; i < std::min(r + step, end); ++i) {
          for (int64_t j = c; j < std::min(c + width, p.columns); ++j) {
            places.push_back(static_cast<size_t>(i * p.columns + j));
            values.push_back(x[places.back()]);
          }
        }
        const double amax = amax_of(values);
        double multiply = 1, inverse = 1, stored = 0;
        if (is_mx(p.rule)) {
          stored = p.rule == ScaleRule::kMxUp ? mx_scale_up(amax, format) : mx_scale_floor(amax, format);
          inverse = std::ldexp(1.0, static_cast<int>(stored) - 127);
          multiply = 1 / inverse;
        } else {
          multiply = p.rule == ScaleRule::kGiven
                         ? p.given[static_cast<size_t>(g)]
                         : float_scale(amax, format, p.rule == ScaleRule::kPowerOfTwo);
          stored = inverse = static_cast<double>(static_cast<float>(1 / multiply));
        }
        const auto at = static_cast<size_t>(band * block_columns + c / width);
        out.scales[at] = stored;
        out.amax[at] = amax;
        for (size_t i = 0; i < places.size(); ++i) {
          const int code = format.encode(fp32_product(values[i], multiply));
          out.codes[places[i]] = static_cast<uint8_t>(code);
          out.values[places[i]] = fp32_product(format.value(code), inverse);
        }
      }
    }
  }
  return out;
}

// Random magnitudes over the whole range of fp32, and every special case that a block can have.
inline std::vector<double> difficult_values(int64_t rows, int64_t columns, uint64_t seed) {
  std::vector<double> x;
  const auto add = [&](double value) { x.push_back(static_cast<double>(static_cast<float>(value))); };
  const double specials[] = {0.0,   -0.0,     448.0,           449.0,     -464.0,       465.0,
                             1e38,  -3.4e38,  INFINITY,        -INFINITY, std::nan(""), 57344.0,
                             1e-45, 0x1p-127, 0x1.000002p-126, 0x1p-149,  61440.0};
  uint64_t state = seed * 2654435761u + 1;
  const auto next = [&state] {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<double>(state >> 11) * 0x1p-53;
  };
  for (int64_t r = 0; r < rows; ++r) {
    const int exponent = static_cast<int>(next() * 40) - 20 + (r % 7 == 3 ? 60 : 0) - (r % 11 == 5 ? 100 : 0);
    for (int64_t c = 0; c < columns; ++c) {
      const double pick = next(), value = (next() - 0.5) * std::ldexp(2.0, exponent);
      if (r % 13 == 6 && c < 64) {
        add(c % 2 == 0 ? 0.0 : -0.0);
      } else if (r % 5 == 2 && pick < 0.02) {
        add(specials[static_cast<size_t>(pick / 0.02 * std::size(specials))]);
      } else {
        add(value);
      }
    }
  }
  return x;
}

}  // namespace biomoe::ref
