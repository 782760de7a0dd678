// The problems that quantisation is tested on, on the CPU and the GPU.
#pragma once

#include <gtest/gtest.h>

#include <ostream>
#include <vector>

#include "biomoe/ops/quantize.h"
#include "tests/ref/quantize.h"

namespace biomoe::test {

struct QuantizeCase {
  int64_t rows, columns;
  std::vector<int64_t> offsets;  // empty: one group
  int64_t group_rows;            // 0: none
};

inline void PrintTo(const QuantizeCase& c, std::ostream* out) {
  *out << c.rows << "x" << c.columns << " in " << c.offsets.size() << " borders, groups of " << c.group_rows;
}

inline const std::vector<QuantizeCase> kQuantizeCases = {
    {0, 64, {}, 0},
    {1, 1, {}, 0},
    {1, 31, {}, 0},
    {3, 33, {}, 0},
    {64, 128, {}, 0},
    {97, 200, {}, 0},
    {130, 264, {}, 0},
    {256, 96, {}, 64},
    {198, 40, {}, 33},
    {320, 208, {}, 160},
    {162, 72, {0, 0, 1, 32, 65, 162}, 0},
    {300, 136, {0, 128, 128, 256}, 0},  // the last rows belong to nobody
    {97, 33, {0, 0, 97, 97}, 0},
};

struct QuantizeVariant {
  Fp8Format format;
  ScaleRule rule;
  BlockShape block;
  double given = 0.37;  // kGiven: the scale of the first group; of the others multiples
};

inline std::vector<QuantizeVariant> quantize_variants() {
  std::vector<QuantizeVariant> all;
  for (const Fp8Format format : {Fp8Format::kE4M3, Fp8Format::kE5M2}) {
    for (const BlockShape& block : kBlockShapes) {
      for (const ScaleRule rule :
           {ScaleRule::kMxUp, ScaleRule::kMxFloor, ScaleRule::kFloat, ScaleRule::kPowerOfTwo}) {
        all.push_back({format, rule, block});
      }
    }
    all.push_back({format, ScaleRule::kGiven, {0, 0}});
  }
  return all;
}

// Of blocks of 1x128 and 128x1 from one reading: rows in groups that begin and end at multiples of 128.
inline const std::vector<QuantizeCase> kColumnCases = {
    {0, 128, {}, 0},
    {128, 128, {}, 0},
    {272, 384, {}, 0},  // the last block has 16 rows
    {384, 256, {}, 128},
    {640, 384, {0, 0, 256, 384, 384, 640}, 0},
    {432, 128, {0, 128, 128, 384}, 0},  // the last rows belong to nobody
    {256, 4096, {0, 256}, 0},
};

// Of operands of Blackwell's products: rows of a group are a multiple of 16, borders of 128.
inline const std::vector<QuantizeCase> kMxCases = {
    {0, 32, {}, 0},
    {16, 31, {}, 0},
    {48, 160, {}, 0},
    {272, 384, {}, 0},
    {384, 264, {}, 128},
    {96, 40, {}, 48},  // groups whose scales are padded
    {640, 392, {0, 0, 256, 384, 384, 640}, 0},
    {432, 128, {0, 128, 128, 384}, 0},  // the last rows belong to nobody
};

// Difficult values, with zeros for the last rows of every 128, as rows are padded.
inline std::vector<double> padded_values(const QuantizeCase& c) {
  std::vector<double> x = ref::difficult_values(c.rows, c.columns, 3);
  for (int64_t r = 0; r < c.rows; ++r) {
    if (r % 128 >= 117) std::fill_n(x.begin() + r * c.columns, c.columns, 0.0);
  }
  return x;
}

// Whether the case has scales by row, or transposed codes.
inline bool has_row_scales(const QuantizeVariant& v) {
  return v.block.rows == 1 && !is_mx(v.rule);
}
inline bool has_transposed(const QuantizeCase& c, const QuantizeVariant& v) {
  return v.block == BlockShape{128, 128} && c.offsets.empty();
}

inline ref::QuantizeProblem problem_of(const QuantizeCase& c, const QuantizeVariant& v) {
  ref::QuantizeProblem problem{c.rows,   c.columns, c.offsets, !c.offsets.empty() || c.group_rows > 0,
                               v.format, v.rule,    v.block};
  if (c.offsets.empty()) {
    const int64_t step = c.group_rows > 0 ? c.group_rows : c.rows;
    problem.offsets = {0};
    do {
      problem.offsets.push_back(problem.offsets.back() + step);
    } while (problem.offsets.back() < c.rows);
  }
  for (size_t g = 0; g + 1 < problem.offsets.size(); ++g) {
    problem.given.push_back(static_cast<double>(static_cast<float>(v.given * static_cast<double>(g + 1))));
  }
  return problem;
}

}  // namespace biomoe::test
