// What the tests of the GPU share: a context, and tensors of any type in its memory, poisoned, set from and
// read as doubles. Without a usable GPU every test is skipped, and says why.
#pragma once

#include <cstring>
#include <memory>

#include "biomoe/ops/device.h"
#include "tests/ops/op_test.h"

namespace biomoe::test {

// At the start of a test that is not a GpuTest: skips where no GPU can be used.
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

class GpuTest : public testing::Test {
 protected:
  void SetUp() override {
    BIOMOE_REQUIRE_GPU();
    handle_ = DeviceHandle(Device::kCuda);
    ctx_.device = Device::kCuda;
    ctx_.state = handle_.get();
  }
  // Scratch memory of exactly the bytes that an op asked for, poisoned.
  Context& with_scratch(size_t bytes) {
    scratch_ = std::make_unique<Arena>(bytes, "test scratch", device_memory(Device::kCuda));
    scratch_->poison_free();
    ctx_.scratch = scratch_.get();
    return ctx_;
  }
  Context& ctx() { return ctx_; }

 private:
  DeviceHandle handle_;
  std::unique_ptr<Arena> scratch_;
  Context ctx_;
};

// The same for kernels that Hopper alone has.
class HopperTest : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    if (device_info(Device::kCuda).compute_capability != 90) GTEST_SKIP() << "needs compute capability 9.0";
  }
};

inline void encode(double value, DType dtype, uint8_t* to) {
  const auto put = [&](auto element) { std::memcpy(to, &element, sizeof(element)); };
  switch (dtype) {
    case DType::kF32:
      return put(static_cast<float>(value));
    case DType::kBF16:
      return put(bf16_from_float(static_cast<float>(value)));
    case DType::kF64:
      return put(value);
    case DType::kI32:
      return put(static_cast<int32_t>(value));
    case DType::kI64:
      return put(static_cast<int64_t>(value));
    case DType::kU16:
      return put(static_cast<uint16_t>(value));
    case DType::kU8:
      return put(static_cast<uint8_t>(value));
    default:
      throw failure("encode: {}", dtype_name(dtype));
  }
}

inline double decode(const uint8_t* from, DType dtype) {
  const auto get = [&](auto element) {
    std::memcpy(&element, from, sizeof(element));
    return element;
  };
  switch (dtype) {
    case DType::kF32:
      return static_cast<double>(get(0.0f));
    case DType::kBF16:
      return static_cast<double>(float_from_bf16(get(uint16_t{0})));
    case DType::kF64:
      return get(0.0);
    case DType::kI32:
      return get(int32_t{0});
    case DType::kI64:
      return static_cast<double>(get(int64_t{0}));
    case DType::kU16:
      return get(uint16_t{0});
    case DType::kU8:
      return get(uint8_t{0});
    default:
      throw failure("decode: {}", dtype_name(dtype));
  }
}

// Standard normal numbers, rounded to the type they will be stored in.
inline std::vector<double> normals(uint64_t seed, int64_t count, DType dtype, double scale = 1.0) {
  const Rng rng(seed, RngStream::kTest);
  std::vector<double> values;
  for (int64_t i = 0; i < count; ++i) {
    uint8_t bytes[8];
    encode(scale * rng.normal(static_cast<uint64_t>(i)), dtype, bytes);
    values.push_back(decode(bytes, dtype));
  }
  return values;
}

// Uniform in [0, bound).
inline std::vector<int32_t> ids(uint64_t seed, int64_t count, int64_t bound) {
  const Rng rng(seed, RngStream::kTest);
  std::vector<int32_t> values;
  for (int64_t i = 0; i < count; ++i) {
    values.push_back(
        static_cast<int32_t>(rng.uniform(static_cast<uint64_t>(i)) * static_cast<double>(bound)));
  }
  return values;
}

inline std::vector<double> doubles(const std::vector<int32_t>& values) {
  return {values.begin(), values.end()};
}

// Where `got` is furthest from `want`, for messages: matrices of so many columns.
inline std::string furthest(const std::vector<double>& got, const std::vector<double>& want,
                            int64_t columns) {
  if (got.size() != want.size()) return fmt::format("{} elements, expected {}", got.size(), want.size());
  size_t at = 0;
  double error = -1.0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double difference = std::abs(got[i] - want[i]);
    if (std::isnan(difference) ? std::isnan(got[i]) != std::isnan(want[i]) : difference > error) {
      at = i;
      error = difference;
      if (std::isnan(difference)) break;
    }
  }
  if (want.empty()) return "no elements";
  const auto i = static_cast<int64_t>(at);
  return fmt::format("at row {}, column {}: {}, expected {}, with unit_error {}", i / columns, i % columns,
                     got[at], want[at], unit_error(got, want));
}

// The largest error of a product of so many terms a sum: one rounding to the output's type; in fp32 tensor
// cores cut off what is below the last digit of a sum at every 16 products (at every one, the other units
// round).
inline double product_tolerance(DType input, DType output, int64_t inner) {
  if (output == DType::kBF16) return tolerance(DType::kBF16);
  const double sums = input == DType::kBF16 ? static_cast<double>(inner) / 16.0 : 0.0;
  return std::max(tolerance(DType::kF32), sums * 0x1p-22);
}

// GPU memory that starts as NaN (-1 for integers), the padding between rows and the bytes around the elements
// included. `offset` elements before the first make its address as little aligned as wanted.
class GpuTensor {
 public:
  GpuTensor(Context& ctx, DType dtype, Shape shape, int64_t row_padding = 0, int64_t offset = 0)
      : ctx_(ctx), dtype_(dtype), shape_(shape), offset_(offset) {
    row_ = TensorView(nullptr, dtype, shape).row_elements();
    stride_ = row_ + row_padding;
    const int64_t rows = shape.rank() ? shape[0] : 1;
    host_.assign(static_cast<size_t>(rows * stride_ + offset) * dtype_size(dtype) + kTail, 0xff);
    memory_ = Arena(host_.size(), "test tensor", device_memory(Device::kCuda));
    data_ = memory_.allocate(host_.size());
    upload();
  }
  GpuTensor& set(const std::vector<double>& values) {
    for (int64_t i = 0; i < size(); ++i) encode(values.at(static_cast<size_t>(i)), dtype_, at(i));
    upload();
    return *this;
  }
  GpuTensor& fill(double value) { return set(std::vector<double>(static_cast<size_t>(size()), value)); }
  void poison() {
    std::fill(host_.begin(), host_.end(), uint8_t{0xff});
    upload();
  }
  TensorView view() const {
    return TensorView(static_cast<uint8_t*>(data_) + static_cast<size_t>(offset_) * dtype_size(dtype_),
                      dtype_, shape_, stride_);
  }
  int64_t size() const { return shape_.num_elements(); }

  // Waits for the GPU.
  std::vector<double> values() {
    download();
    std::vector<double> all;
    for (int64_t i = 0; i < size(); ++i) all.push_back(decode(at(i), dtype_));
    return all;
  }
  const std::vector<uint8_t>& bytes() {
    download();
    return host_;
  }
  // Nothing was written outside of the elements.
  bool padding_untouched() {
    download();
    std::vector<bool> inside(host_.size(), false);
    for (int64_t i = 0; i < size(); ++i) {
      const auto begin = static_cast<size_t>(at(i) - host_.data());
      for (size_t byte = 0; byte < dtype_size(dtype_); ++byte) inside[begin + byte] = true;
    }
    for (size_t i = 0; i < host_.size(); ++i) {
      if (!inside[i] && host_[i] != 0xff) return false;
    }
    return true;
  }

 private:
  static constexpr size_t kTail = 64;

  uint8_t* at(int64_t i) {
    return host_.data() + static_cast<size_t>(offset_ + i / row_ * stride_ + i % row_) * dtype_size(dtype_);
  }
  void upload() {
    copy_to_device(ctx_, data_, host_.data(), host_.size());
    device_wait_sync(ctx_);
  }
  void download() {
    copy_to_host(ctx_, host_.data(), data_, host_.size());
    device_wait_sync(ctx_);
  }

  Context& ctx_;
  DType dtype_;
  Shape shape_;
  int64_t row_ = 1, stride_ = 1, offset_ = 0;
  std::vector<uint8_t> host_;
  Arena memory_;
  void* data_ = nullptr;
};

inline const std::vector<DType> kComputeTypes = {DType::kF32, DType::kBF16};

}  // namespace biomoe::test
