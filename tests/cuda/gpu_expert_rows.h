// Rows of experts as the GPU's products for all experts take them.
#pragma once

#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "biomoe/ops/cuda_sizes.h"
#include "tests/cuda/gpu_test.h"

namespace biomoe::test {

// Every expert's rows are followed by padding up to a whole tile, and those of the last by rows of nobody.
class GpuExpertRows {
 public:
  GpuExpertRows(Context& ctx, const std::vector<int64_t>& counts)
      : counts_(counts),
        device_offsets_(ctx, DType::kI64, Shape{static_cast<int64_t>(counts.size()) + 1}),
        device_counts_(ctx, DType::kI32, Shape{static_cast<int64_t>(counts.size())}) {
    for (const int64_t count : counts)
      offsets_.push_back(offsets_.back() + (count + kTile - 1) / kTile * kTile);
    device_offsets_.set({offsets_.begin(), offsets_.end()});
    device_counts_.set({counts.begin(), counts.end()});
  }

  int64_t experts() const { return static_cast<int64_t>(counts_.size()); }
  int64_t used() const { return offsets_.back(); }  // padding included
  int64_t capacity() const { return used() + kSpare; }
  const std::vector<int64_t>& counts() const { return counts_; }
  const std::vector<int64_t>& offsets() const { return offsets_; }
  TensorView offsets_E1() const { return device_offsets_.view(); }
  TensorView rows_E() const { return device_counts_.view(); }

  // Of the used rows: normal numbers, and zeros where they are padding.
  std::vector<double> normal_rows(uint64_t seed, int64_t columns, DType type, double scale = 1.0) const {
    std::vector<double> x = normals(seed, used() * columns, type, scale);
    for (size_t e = 0; e < counts_.size(); ++e) {
      std::fill(x.begin() + (offsets_[e] + counts_[e]) * columns, x.begin() + offsets_[e + 1] * columns, 0.0);
    }
    return x;
  }
  // With `value` in the rows of nobody.
  std::vector<double> with_spare(std::vector<double> rows, int64_t columns,
                                 double value = std::nan("")) const {
    rows.resize(static_cast<size_t>(capacity() * columns), value);
    return rows;
  }

  // Every `step`th row of each expert is compared, at the scale of the expert's; its padding must be zero,
  // and rows of nobody NaN as they were. `want` has the used rows.
  void expect(const std::vector<double>& got, const std::vector<double>& want, int64_t columns, DType dtype,
              const std::string& what, int64_t step = 1) const {
    const auto row = [columns](const std::vector<double>& of, int64_t r) { return of.begin() + r * columns; };
    for (size_t e = 0; e < counts_.size(); ++e) {
      const int64_t begin = offsets_[e], end = begin + counts_[e];
      std::vector<double> some, expected;
      for (int64_t r = begin; r < end; r += step) {
        some.insert(some.end(), row(got, r), row(got, r + 1));
        expected.insert(expected.end(), row(want, r), row(want, r + 1));
      }
      EXPECT_LE(unit_error(some, expected), tolerance(dtype))
          << what << ", expert " << e << " of " << counts_[e] << " rows from row " << begin << ": "
          << furthest(some, expected, columns);
      expect_all(got, end * columns, offsets_[e + 1] * columns, 0.0, what + ", padding");
    }
    expect_all(got, used() * columns, capacity() * columns, std::nan(""), what + ", rows of nobody");
  }

 private:
  static constexpr int64_t kTile = cuda::kExpertRowAlignment, kSpare = 128;

  static void expect_all(const std::vector<double>& got, int64_t begin, int64_t end, double value,
                         const std::string& what) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
      const bool good = std::isnan(value) ? std::isnan(got.at(i)) : got.at(i) == value;
      ASSERT_TRUE(good) << what << ": element " << i << " is " << got[i] << ", expected " << value;
    }
  }

  std::vector<int64_t> counts_, offsets_{0};
  GpuTensor device_offsets_, device_counts_;
};

}  // namespace biomoe::test
