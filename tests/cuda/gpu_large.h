// What the tests of more than 2^31 elements share: tensors without a copy on the host, filled by look-ups in
// small tables, so that the host knows every row.
#pragma once

#include <string>
#include <vector>

#include "biomoe/ops/embedding.h"
#include "tests/cuda/gpu_test.h"

namespace biomoe::test {

inline constexpr int64_t kRows = 530000, kWidth = 4096, kTableRows = 101;
static_assert(kRows * kWidth > int64_t{1} << 31);
inline const std::vector<int64_t> kSpots = {0, 1, 524287, 524288, 524289, kRows / 2, kRows - 2, kRows - 1};

using Values = std::vector<double>;

inline void append(Values& all, const Values& more) {
  all.insert(all.end(), more.begin(), more.end());
}

// GPU memory without a copy on the host; poisoned.
class Large {
 public:
  Large(Context& ctx, DType dtype, Shape shape) : ctx_(ctx) {
    const size_t bytes = align_up(static_cast<size_t>(shape.num_elements()) * dtype_size(dtype));
    memory_ = Arena(bytes, "a large tensor", device_memory(Device::kCuda));
    memory_.poison_free();
    view_ = memory_.tensor(dtype, shape);
  }
  const TensorView& view() const { return view_; }
  // The same memory with other axes.
  TensorView as(Shape shape) const { return TensorView(view_.data, view_.dtype, shape); }
  Values row(int64_t i) const { return elements(i * view_.row_elements(), view_.row_elements()); }
  Values elements(int64_t begin, int64_t count) const {
    const size_t size = dtype_size(view_.dtype);
    std::vector<uint8_t> bytes(static_cast<size_t>(count) * size);
    copy_to_host(ctx_, bytes.data(), static_cast<uint8_t*>(view_.data) + static_cast<size_t>(begin) * size,
                 bytes.size());
    device_wait_sync(ctx_);
    Values values;
    for (size_t at = 0; at < bytes.size(); at += size)
      values.push_back(decode(bytes.data() + at, view_.dtype));
    return values;
  }
  Values rows(const std::vector<int64_t>& spots) const {
    Values all;
    for (const int64_t spot : spots) append(all, row(spot));
    return all;
  }

 private:
  Context& ctx_;
  Arena memory_;
  TensorView view_;
};

// Rows of a table that a large tensor is filled with.
struct Table {
  Table(Context& ctx, uint64_t seed, int64_t width_in, double scale = 1.0)
      : width(width_in),
        values(normals(seed, kTableRows * width_in, DType::kBF16, scale)),
        tensor(ctx, DType::kBF16, Shape{kTableRows, width_in}) {
    tensor.set(values);
  }
  Values row(int32_t id) const {
    const auto begin = values.begin() + id * width;
    return {begin, begin + width};
  }
  int64_t width;
  Values values;
  GpuTensor tensor;
};

struct Filler {
  Filler(Context& ctx_in, uint64_t seed, int64_t rows)
      : ctx(ctx_in), tokens(ids(seed, rows, kTableRows)), tensor(ctx_in, DType::kI32, Shape{rows}) {
    tensor.set(doubles(tokens));
  }
  void fill(const Table& table, const TensorView& x) {
    embedding_forward(ctx, {.tokens_T = tensor.view(), .weight_VD = table.tensor.view(), .y_TD = x});
  }
  Values row(const Table& table, int64_t at) const { return table.row(tokens[static_cast<size_t>(at)]); }
  Values rows(const Table& table, const std::vector<int64_t>& spots) const {
    Values all;
    for (const int64_t spot : spots) append(all, row(table, spot));
    return all;
  }
  Context& ctx;
  std::vector<int32_t> tokens;
  GpuTensor tensor;
};

#define BIOMOE_REQUIRE_GPU_MEMORY(gib)                                                       \
  do {                                                                                       \
    const size_t wanted = size_t{gib} << 30, there = device_info(Device::kCuda).free_bytes;  \
    if (there < wanted)                                                                      \
      GTEST_SKIP() << wanted << " bytes of GPU memory are needed, " << there << " are free"; \
  } while (false)

}  // namespace biomoe::test
