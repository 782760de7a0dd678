#include "biomoe/core/tensor_view.h"

#include <limits>

namespace biomoe {

Shape::Shape(std::initializer_list<int64_t> dims) {
  for (int64_t dim : dims) push_back(dim);
}

void Shape::push_back(int64_t dim) {
  BM_CHECK(rank_ < kMaxRank, "a tensor has at most {} axes", kMaxRank);
  BM_CHECK(dim >= 0, "axis {} has a negative size {}", rank_, dim);
  dims_[static_cast<size_t>(rank_++)] = dim;
}

int64_t Shape::operator[](int axis) const {
  BM_CHECK(axis >= 0 && axis < rank_, "axis {} of a tensor with {} axes", axis, rank_);
  return dims_[static_cast<size_t>(axis)];
}

int64_t Shape::num_elements() const {
  int64_t product = 1;
  for (int axis = 0; axis < rank_; ++axis) {
    const int64_t dim = dims_[static_cast<size_t>(axis)];
    BM_CHECK(dim == 0 || product <= std::numeric_limits<int64_t>::max() / dim, "shape {} overflows 64 bits",
             str());
    product *= dim;
  }
  return product;
}

bool Shape::operator==(const Shape& other) const {
  return rank_ == other.rank_ && dims_ == other.dims_;
}

std::string Shape::str() const {
  std::string text = "[";
  for (int axis = 0; axis < rank_; ++axis) {
    if (axis) text += ", ";
    text += std::to_string(dims_[static_cast<size_t>(axis)]);
  }
  return text + "]";
}

TensorView::TensorView(void* data_in, DType dtype_in, Shape shape_in)
    : data(data_in), dtype(dtype_in), shape(shape_in) {
  row_stride = row_elements();
}

TensorView::TensorView(void* data_in, DType dtype_in, Shape shape_in, int64_t row_stride_in)
    : data(data_in), dtype(dtype_in), shape(shape_in), row_stride(row_stride_in) {
  BM_CHECK(row_stride >= row_elements(), "row stride {} is below the row of shape {}", row_stride,
           shape.str());
}

int64_t TensorView::row_elements() const {
  int64_t product = 1;
  for (int axis = 1; axis < shape.rank(); ++axis) product *= shape[axis];
  return product;
}

TensorView TensorView::rows(int64_t begin, int64_t count) const {
  BM_CHECK(begin >= 0 && count >= 0 && begin + count <= shape[0], "rows [{}, {}) of shape {}", begin,
           begin + count, shape.str());
  Shape part{count};
  for (int axis = 1; axis < shape.rank(); ++axis) part.push_back(shape[axis]);
  auto* start = static_cast<uint8_t*>(data) + static_cast<size_t>(begin * row_stride) * dtype_size(dtype);
  return TensorView(start, dtype, part, row_stride);
}

TensorView TensorView::columns(int64_t begin, int64_t count) const {
  BM_CHECK(shape.rank() == 2 && begin >= 0 && count >= 0 && begin + count <= shape[1],
           "columns [{}, {}) of shape {}", begin, begin + count, shape.str());
  auto* start = static_cast<uint8_t*>(data) + static_cast<size_t>(begin) * dtype_size(dtype);
  return TensorView(start, dtype, Shape{shape[0], count}, row_stride);
}

}  // namespace biomoe
