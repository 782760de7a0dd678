// What the tests of operations share: poisoned tensors, contexts, and one measure and table of error.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <type_traits>
#include <vector>

#include "biomoe/core/context.h"
#include "biomoe/core/rng.h"
#include "biomoe/core/tensor_view.h"

namespace biomoe::test {

// The largest error that an operation may show at unit scale, by the type it computes in.
inline double tolerance(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return 3e-6;
    case DType::kBF16:
      return 1e-2;
    case DType::kF16:
      return 2e-3;
    default:
      return 1e-12;
  }
}

// The largest difference, in units of the largest expected value. Infinity when a value is not a number where
// one is expected (or the reverse), or when the sizes differ.
inline double unit_error(const std::vector<double>& got, const std::vector<double>& want) {
  if (got.size() != want.size()) return std::numeric_limits<double>::infinity();
  double scale = 0.0;
  double error = 0.0;
  for (size_t i = 0; i < want.size(); ++i) {
    if (std::isfinite(want[i])) {
      scale = std::max(scale, std::abs(want[i]));
      if (!std::isfinite(got[i])) return std::numeric_limits<double>::infinity();
      error = std::max(error, std::abs(got[i] - want[i]));
    } else if (std::isnan(want[i]) ? !std::isnan(got[i]) : got[i] != want[i]) {
      return std::numeric_limits<double>::infinity();
    }
  }
  return error == 0.0 ? 0.0 : error / scale;
}

inline std::vector<double> sum_of(std::vector<double> a, const std::vector<double>& b) {
  std::transform(a.begin(), a.end(), b.begin(), a.begin(), std::plus<>());
  return a;
}

template <typename T>
constexpr DType dtype_of() {
  if constexpr (std::is_same_v<T, float>) return DType::kF32;
  if constexpr (std::is_same_v<T, double>) return DType::kF64;
  if constexpr (std::is_same_v<T, int32_t>) return DType::kI32;
  if constexpr (std::is_same_v<T, int64_t>) return DType::kI64;
}

// Owns a tensor whose memory, padding between rows included, starts as NaN (-1 for integers).
template <typename T>
class Tensor {
 public:
  explicit Tensor(Shape shape, int64_t row_padding = 0) : shape_(shape) {
    row_ = TensorView(nullptr, dtype_of<T>(), shape).row_elements();
    stride_ = row_ + row_padding;
    // One element more than needed: the storage of an empty tensor is still an address.
    data_.resize(static_cast<size_t>((shape.rank() ? shape[0] : 1) * stride_) + 1);
    std::memset(static_cast<void*>(data_.data()), 0xff, data_.size() * sizeof(T));
  }

  TensorView view() { return TensorView(data_.data(), dtype_of<T>(), shape_, stride_); }
  T& at(int64_t row, int64_t column = 0) { return data_[static_cast<size_t>(row * stride_ + column)]; }
  T at(int64_t row, int64_t column = 0) const { return data_[static_cast<size_t>(row * stride_ + column)]; }
  int64_t size() const { return shape_.num_elements(); }
  const Shape& shape() const { return shape_; }

  Tensor& fill(T value) {
    for_each([&](T& element, int64_t) { element = value; });
    return *this;
  }
  Tensor& fill_normal(uint64_t seed, double scale = 1.0, double mean = 0.0) {
    const Rng rng(seed, RngStream::kTest);
    for_each([&](T& element, int64_t i) {
      element = static_cast<T>(mean + scale * rng.normal(static_cast<uint64_t>(i)));
    });
    return *this;
  }
  // Uniform in [0, bound).
  Tensor& fill_ids(uint64_t seed, int64_t bound) {
    const Rng rng(seed, RngStream::kTest);
    for_each([&](T& element, int64_t i) {
      element = static_cast<T>(rng.uniform(static_cast<uint64_t>(i)) * static_cast<double>(bound));
    });
    return *this;
  }
  Tensor& set(const std::vector<double>& values) {
    for_each([&](T& element, int64_t i) { element = static_cast<T>(values.at(static_cast<size_t>(i))); });
    return *this;
  }

  // The elements without padding.
  std::vector<double> values() const {
    std::vector<double> all;
    all.reserve(static_cast<size_t>(size()));
    for (int64_t i = 0; i < size(); ++i) all.push_back(static_cast<double>(at(i / row_, i % row_)));
    return all;
  }
  std::vector<T> elements() const {
    std::vector<T> all;
    for (int64_t i = 0; i < size(); ++i) all.push_back(at(i / row_, i % row_));
    return all;
  }
  bool same_bits(const Tensor& other) const {
    return data_.size() == other.data_.size() &&
           std::memcmp(data_.data(), other.data_.data(), data_.size() * sizeof(T)) == 0;
  }
  // Nothing was written between the rows or after them.
  bool padding_untouched() const {
    std::vector<uint8_t> poison(sizeof(T), 0xff);
    for (int64_t i = 0; i < static_cast<int64_t>(data_.size()); ++i) {
      const bool inside = stride_ > 0 && i % stride_ < row_ && i < static_cast<int64_t>(data_.size()) - 1;
      if (!inside && std::memcmp(&data_[static_cast<size_t>(i)], poison.data(), sizeof(T)) != 0) return false;
    }
    return true;
  }

 private:
  template <typename Body>
  void for_each(const Body& body) {
    for (int64_t i = 0; i < size(); ++i) body(at(i / row_, i % row_), i);
  }

  Shape shape_;
  int64_t row_ = 1;
  int64_t stride_ = 1;
  std::vector<T> data_;
};

// A CPU context with poisoned scratch memory of exactly the bytes that an op asked for.
class TestContext {
 public:
  explicit TestContext(int num_threads, size_t scratch_bytes = 0) : scratch_(scratch_bytes, "test scratch") {
    scratch_.poison_free();
    ctx_.num_threads = num_threads;
    ctx_.scratch = &scratch_;
  }
  Context& operator*() { return ctx_; }

 private:
  Arena scratch_;
  Context ctx_;
};

}  // namespace biomoe::test

#define EXPECT_CLOSE(got, want, dtype)                                                   \
  EXPECT_LE(::biomoe::test::unit_error((got), (want)), ::biomoe::test::tolerance(dtype)) \
      << #got " against " #want
