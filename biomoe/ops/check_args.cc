#include "biomoe/ops/check_args.h"

#include <algorithm>

#include "biomoe/core/error.h"

namespace biomoe {

void check_tensor(const char* op, const char* argument, const TensorView& view, DType dtype,
                  const Shape& shape, Layout layout) {
  if (view.dtype != dtype || !(view.shape == shape)) {
    throw failure("{}: {} is {} {}, expected {} {}", op, argument, dtype_name(view.dtype), view.shape.str(),
                  dtype_name(dtype), shape.str());
  }
  if (layout == Layout::kContiguous && shape.rank() > 0 && shape[0] > 1 && !view.contiguous()) {
    throw failure("{}: {} {} has a row stride of {}, expected a contiguous tensor", op, argument, shape.str(),
                  view.row_stride);
  }
  if (layout != Layout::kShapeOnly && !view && shape.num_elements() > 0) {
    throw failure("{}: {} {} is absent", op, argument, shape.str());
  }
}

void check_compute_type(const char* op, const char* argument, const TensorView& view, Device device) {
  const bool known = view.dtype == DType::kF32 || (device == Device::kCuda && view.dtype == DType::kBF16);
  BM_CHECK(known, "{}: {} is {}, expected {}", op, argument, dtype_name(view.dtype),
           device == Device::kCpu ? "F32" : "F32 or BF16");
}

void check_rank(const char* op, const char* argument, const TensorView& view, int rank) {
  if (view.shape.rank() != rank) {
    throw failure("{}: {} has shape {}, expected {} axes", op, argument, view.shape.str(), rank);
  }
}

void check_ids(const char* op, const char* argument, const TensorView& ids, int64_t low, int64_t high) {
  const int32_t* values = ids.i32();
  const int64_t count = ids.num_elements();
  bool ok = true;
  for (int64_t i = 0; i < count; ++i) ok &= values[i] >= low && values[i] < high;
  if (ok) return;
  const int32_t* bad =
      std::find_if(values, values + count, [&](int32_t id) { return id < low || id >= high; });
  throw failure("{}: {}[{}] is {}, expected a value in [{}, {})", op, argument, bad - values, *bad, low,
                high);
}

}  // namespace biomoe
