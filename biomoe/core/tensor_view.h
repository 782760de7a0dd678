// Shape and TensorView: a typed, non-owning, row-major window on memory.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "biomoe/core/dtype.h"
#include "biomoe/core/error.h"

namespace biomoe {

inline constexpr int kMaxRank = 4;

class Shape {
 public:
  Shape() = default;
  Shape(std::initializer_list<int64_t> dims);
  int rank() const { return rank_; }
  int64_t operator[](int axis) const;
  int64_t num_elements() const;  // 1 for a scalar (rank 0)
  bool operator==(const Shape& other) const;
  std::string str() const;  // "[2, 3]"
  void push_back(int64_t dim);

 private:
  std::array<int64_t, kMaxRank> dims_{};
  int rank_ = 0;
};

// What is viewed lives elsewhere (an Arena, a mapped file); a view is copied freely. Elements of one row (all
// axes but the first) are contiguous; consecutive rows are `row_stride` elements apart, so that a view can
// name a column band of a wider matrix. A default-constructed view is "absent".
struct TensorView {
  void* data = nullptr;
  DType dtype = DType::kF32;
  Shape shape;
  int64_t row_stride = 0;

  TensorView() = default;
  TensorView(void* data, DType dtype, Shape shape);
  TensorView(void* data, DType dtype, Shape shape, int64_t row_stride);

  explicit operator bool() const { return data != nullptr; }
  int64_t num_elements() const { return shape.num_elements(); }
  int64_t row_elements() const;  // elements of one row
  bool contiguous() const { return shape.rank() == 0 || row_stride == row_elements(); }
  size_t bytes() const { return static_cast<size_t>(num_elements()) * dtype_size(dtype); }

  // Rows [begin, begin + count) of the first axis.
  TensorView rows(int64_t begin, int64_t count) const;
  // Columns [begin, begin + count) of a rank-2 view.
  TensorView columns(int64_t begin, int64_t count) const;

  float* f32() const { return typed<float>(DType::kF32); }
  double* f64() const { return typed<double>(DType::kF64); }
  int32_t* i32() const { return typed<int32_t>(DType::kI32); }
  int64_t* i64() const { return typed<int64_t>(DType::kI64); }
  uint16_t* bf16() const { return typed<uint16_t>(DType::kBF16); }  // as bits

 private:
  template <typename T>
  T* typed(DType want) const {
    BM_CHECK(dtype == want || data == nullptr, "a tensor of {} was read as {}", dtype_name(dtype),
             dtype_name(want));
    return static_cast<T*>(data);
  }
};

}  // namespace biomoe
