// What the tests of the GPU's operations share: a context and poisoned tensors in GPU memory.
#pragma once

#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "biomoe/core/dtype.h"
#include "biomoe/ops/device.h"
#include "tests/ops/op_test.h"

namespace biomoe::test {

// At the start of every test: skips where no GPU can be used.
#define BIOMOE_REQUIRE_GPU()                                                             \
  do {                                                                                   \
    std::string why;                                                                     \
    if (!::biomoe::device_available(::biomoe::Device::kCuda, &why)) GTEST_SKIP() << why; \
  } while (false)

// A GPU context, with poisoned scratch memory of exactly the bytes that an op asked for.
class GpuContext {
 public:
  explicit GpuContext(size_t scratch_bytes = 0)
      : handle_(Device::kCuda), scratch_(scratch_bytes, "test scratch", device_memory(Device::kCuda)) {
    ctx_.device = Device::kCuda;
    ctx_.state = handle_.get();
    ctx_.scratch = &scratch_;
    scratch_.poison_free();
  }
  Context& operator*() { return ctx_; }
  Context* operator->() { return &ctx_; }
  Arena& scratch() { return scratch_; }

 private:
  DeviceHandle handle_;
  Arena scratch_;
  Context ctx_;
};

// Owns a tensor in GPU memory that starts as NaN (-1 for integers), the padding between rows included.
// `offset` elements before it make its address as little aligned as wanted.
class GpuTensor {
 public:
  GpuTensor(Context& ctx, DType dtype, Shape shape, int64_t row_padding = 0, int64_t offset = 0)
      : ctx_(ctx), dtype_(dtype), shape_(shape), offset_(offset) {
    row_ = TensorView(nullptr, dtype, shape).row_elements();
    stride_ = row_ + row_padding;
    host_.assign(
        static_cast<size_t>((shape.rank() ? shape[0] : 1) * stride_ + offset + 1) * dtype_size(dtype), 0xff);
    memory_ = device_memory(Device::kCuda).reserve(host_.size(), "a test");
    upload();
  }
  ~GpuTensor() { device_memory(Device::kCuda).free(memory_, host_.size()); }
  GpuTensor(const GpuTensor&) = delete;
  GpuTensor& operator=(const GpuTensor&) = delete;

  TensorView view() const {
    return TensorView(static_cast<uint8_t*>(memory_) + static_cast<size_t>(offset_) * dtype_size(dtype_),
                      dtype_, shape_, stride_);
  }

  // The elements without padding, rounded to the type.
  void set(const std::vector<double>& values) {
    for (size_t i = 0; i < values.size(); ++i) write(position(i), values[i]);
    upload();
  }
  void poison() {
    std::fill(host_.begin(), host_.end(), uint8_t{0xff});
    upload();
  }
  std::vector<double> values() {
    download();
    std::vector<double> all;
    for (int64_t i = 0; i < shape_.num_elements(); ++i) all.push_back(read(position(static_cast<size_t>(i))));
    return all;
  }
  std::vector<uint8_t> bytes() {
    download();
    return host_;
  }
  // Nothing was written outside of the elements.
  bool padding_untouched() {
    download();
    std::vector<bool> inside(host_.size(), false);
    const size_t element = dtype_size(dtype_);
    for (int64_t i = 0; i < shape_.num_elements(); ++i) {
      for (size_t byte = 0; byte < element; ++byte) inside[position(static_cast<size_t>(i)) + byte] = true;
    }
    for (size_t i = 0; i < host_.size(); ++i) {
      if (!inside[i] && host_[i] != 0xff) return false;
    }
    return true;
  }

 private:
  size_t position(size_t element) const {
    const auto row = static_cast<size_t>(row_);
    return (static_cast<size_t>(offset_) + element / row * static_cast<size_t>(stride_) + element % row) *
           dtype_size(dtype_);
  }
  template <typename T>
  T get(size_t at) const {
    T value;
    std::memcpy(&value, host_.data() + at, sizeof(T));
    return value;
  }
  template <typename T>
  void put(size_t at, T value) {
    std::memcpy(host_.data() + at, &value, sizeof(T));
  }
  void write(size_t at, double value) {
    if (dtype_ == DType::kBF16) return put(at, bf16_from_float(static_cast<float>(value)));
    if (dtype_ == DType::kF32) return put(at, static_cast<float>(value));
    if (dtype_ == DType::kI64) return put(at, static_cast<int64_t>(value));
    put(at, static_cast<int32_t>(value));
  }
  double read(size_t at) const {
    if (dtype_ == DType::kBF16) return static_cast<double>(float_from_bf16(get<uint16_t>(at)));
    if (dtype_ == DType::kF32) return static_cast<double>(get<float>(at));
    if (dtype_ == DType::kI64) return static_cast<double>(get<int64_t>(at));
    return static_cast<double>(get<int32_t>(at));
  }
  void upload() {
    copy_to_device(ctx_, memory_, host_.data(), host_.size());
    device_wait_sync(ctx_);
  }
  void download() {
    copy_to_host(ctx_, host_.data(), memory_, host_.size());
    device_wait_sync(ctx_);
  }

  Context& ctx_;
  DType dtype_;
  Shape shape_;
  int64_t row_ = 1, stride_ = 1, offset_ = 0;
  std::vector<uint8_t> host_;
  void* memory_ = nullptr;
};

// Standard normal values times scale, as the type holds them.
inline std::vector<double> normal_values(int64_t count, uint64_t seed, DType dtype, double scale = 1.0) {
  const Rng rng(seed, RngStream::kTest);
  std::vector<double> values;
  for (int64_t i = 0; i < count; ++i) {
    const auto value = static_cast<float>(scale * rng.normal(static_cast<uint64_t>(i)));
    values.push_back(
        static_cast<double>(dtype == DType::kBF16 ? float_from_bf16(bf16_from_float(value)) : value));
  }
  return values;
}

}  // namespace biomoe::test
