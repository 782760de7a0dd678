#include "tests/cuda/gpu_test.h"
#include "tests/ops/quantize_cases.h"

namespace biomoe::test {
namespace {

// Bytes on the GPU that start as 0xff.
class GpuBytes {
 public:
  GpuBytes(Context& ctx, size_t bytes)
      : ctx_(ctx),
        host_(bytes + 16, 0xff),
        memory_(host_.size(), "test bytes", device_memory(Device::kCuda)) {
    data_ = memory_.allocate(host_.size());
    upload();
  }
  void* data() { return data_; }
  std::vector<uint8_t>& host() { return host_; }
  void upload() {
    copy_to_device(ctx_, data_, host_.data(), host_.size());
    device_wait_sync(ctx_);
  }
  const std::vector<uint8_t>& read() {
    copy_to_host(ctx_, host_.data(), data_, host_.size());
    device_wait_sync(ctx_);
    return host_;
  }

 private:
  Context& ctx_;
  std::vector<uint8_t> host_;
  Arena memory_;
  void* data_;
};

// Memory where a context's device reads it, poisoned, then filled.
class Memory {
 public:
  explicit Memory(Context& ctx) : ctx_(ctx) {}
  void* make(size_t bytes, const std::function<void(uint8_t*)>& fill = {}) {
    if (ctx_.device == Device::kCpu) {
      host_.emplace_back(bytes + 16, uint8_t{0xff});
      if (fill) fill(host_.back().data());
      return host_.back().data();
    }
    device_.push_back(std::make_unique<GpuBytes>(ctx_, bytes));
    if (fill) fill(device_.back()->host().data());
    device_.back()->upload();
    return device_.back()->data();
  }
  std::vector<uint8_t> read(const void* data) {
    for (auto& block : host_) {
      if (block.data() == data) return block;
    }
    for (auto& block : device_) {
      if (block->data() == data) return block->read();
    }
    throw failure("no such memory");
  }

 private:
  Context& ctx_;
  std::vector<std::unique_ptr<GpuBytes>> device_;
  std::vector<std::vector<uint8_t>> host_;
};

struct Outputs {
  std::vector<uint8_t> data, scales, amax, row_scales, transposed, dequantized;
  friend bool operator==(const Outputs&, const Outputs&) = default;
};

// NaN has one meaning and many bit patterns.
std::vector<uint8_t> with_one_nan(std::vector<uint8_t> bytes, DType type) {
  const size_t size = dtype_size(type);
  for (size_t i = 0; i + size <= bytes.size(); i += size) {
    const bool poison =
        std::all_of(bytes.begin() + static_cast<int64_t>(i), bytes.begin() + static_cast<int64_t>(i + size),
                    [](uint8_t byte) { return byte == 0xff; });
    if (!poison && std::isnan(decode(bytes.data() + i, type))) encode(std::nan(""), type, bytes.data() + i);
  }
  return bytes;
}

class CudaQuantizeTest : public GpuTest {
 protected:
  // Rows of x lie `padding` elements apart, which is what takes kernels from vectors to single elements.
  Outputs run(Context& on, const QuantizeCase& c, const QuantizeVariant& v, DType type,
              const std::vector<double>& source, int64_t padding) {
    const ref::QuantizeProblem problem = problem_of(c, v);
    const int64_t stride = c.columns + padding;
    const auto elements = static_cast<size_t>(c.rows * stride);
    QuantizeArgs args;
    args.format = v.format;
    args.rule = v.rule;
    args.block = v.block;
    args.group_rows = c.group_rows;
    Memory memory(on);
    const size_t width = dtype_size(type);
    void* x = memory.make(elements * width, [&](uint8_t* to) {
      for (int64_t i = 0; i < c.rows * c.columns; ++i) {
        encode(source[static_cast<size_t>(i)], type,
               to + static_cast<size_t>(i / c.columns * stride + i % c.columns) * width);
      }
    });
    void* offsets = memory.make(c.offsets.size() * 8, [&](uint8_t* to) {
      if (!c.offsets.empty()) std::memcpy(to, c.offsets.data(), c.offsets.size() * 8);
    });
    void* given = memory.make(problem.given.size() * 4, [&](uint8_t* to) {
      for (size_t i = 0; i < problem.given.size(); ++i) encode(problem.given[i], DType::kF32, to + 4 * i);
    });
    args.x_RC = TensorView(x, type, Shape{c.rows, c.columns}, stride);
    if (!c.offsets.empty()) {
      args.offsets_E1 = TensorView(offsets, DType::kI64, Shape{static_cast<int64_t>(c.offsets.size())});
    }
    const BlockGrid grid = block_grid(args);
    const Shape blocks{grid.bands(), grid.block_columns()};
    const auto count = static_cast<size_t>(blocks.num_elements());
    const DType scale_type = is_mx(v.rule) ? DType::kU8 : DType::kF32;
    args.data_RC = TensorView(memory.make(elements), DType::kU8, args.x_RC.shape, stride);
    args.scales_NB = TensorView(memory.make(count * dtype_size(scale_type)), scale_type, blocks);
    args.amax_NB = TensorView(memory.make(count * 4, [&](uint8_t* to) { std::memset(to, 0, count * 4); }),
                              DType::kF32, blocks);
    args.dequantized_RC = TensorView(memory.make(elements * width), type, args.x_RC.shape, stride);
    if (v.rule == ScaleRule::kGiven) {
      args.given_scales_N = TensorView(given, DType::kF32, Shape{static_cast<int64_t>(problem.given.size())});
    }
    const int64_t stride_of_scales = row_scales_stride(c.rows);
    void* row_scales = memory.make(static_cast<size_t>(grid.block_columns() * stride_of_scales) * 4);
    void* transposed = memory.make(static_cast<size_t>(c.rows * c.columns));
    if (has_row_scales(v)) {
      args.row_scales_BR = TensorView(row_scales, DType::kF32, Shape{grid.block_columns(), stride_of_scales});
    }
    if (has_transposed(c, v)) {
      args.transposed_CR = TensorView(
          transposed, DType::kU8, Shape{grid.groups * c.columns, c.group_rows > 0 ? c.group_rows : c.rows});
    }
    quantize(on, args);
    return {memory.read(args.data_RC.data), memory.read(args.scales_NB.data),
            memory.read(args.amax_NB.data), memory.read(row_scales),
            memory.read(transposed),        with_one_nan(memory.read(args.dequantized_RC.data), type)};
  }
};

// The CPU's outputs for the same source; in bf16 what the codes stand for is rounded from fp32.
Outputs rounded_to(Outputs outputs, DType type) {
  if (type == DType::kF32) return outputs;
  std::vector<uint8_t> bytes(16, 0xff);
  std::vector<uint8_t> all;
  const size_t elements = (outputs.dequantized.size() - 16) / 4;
  for (size_t i = 0; i < elements; ++i) {
    uint32_t bits;
    std::memcpy(&bits, outputs.dequantized.data() + 4 * i, 4);
    const uint16_t element = bits == 0xffffffffu ? 0xffff : bf16_from_float(std::bit_cast<float>(bits));
    all.push_back(static_cast<uint8_t>(element & 0xff));
    all.push_back(static_cast<uint8_t>(element >> 8));
  }
  all.insert(all.end(), bytes.begin(), bytes.end());
  outputs.dequantized = with_one_nan(all, type);
  return outputs;
}

TEST_F(CudaQuantizeTest, IsThatOfTheCpuInEveryByte) {
  Context cpu;
  for (const QuantizeCase& c : kQuantizeCases) {
    for (const DType type : kComputeTypes) {
      std::vector<double> source = ref::difficult_values(c.rows, c.columns, 3);
      for (double& value : source) {
        uint8_t bytes[8];
        encode(value, type, bytes);
        value = decode(bytes, type);
      }
      for (const QuantizeVariant& v : quantize_variants()) {
        for (const int64_t padding : {0, 3}) {
          Context& gpu = with_scratch(quantize_scratch_bytes(Device::kCuda, 16));
          const Outputs want = rounded_to(run(cpu, c, v, DType::kF32, source, padding), type);
          const Outputs got = run(gpu, c, v, type, source, padding);
          const auto label = testing::Message()
                             << testing::PrintToString(c) << " " << dtype_name(type) << " blocks "
                             << v.block.rows << "x" << v.block.columns << " rule " << static_cast<int>(v.rule)
                             << " format " << static_cast<int>(v.format) << " padding " << padding;
          ASSERT_EQ(got.data, want.data) << label;
          ASSERT_EQ(got.scales, want.scales) << label;
          ASSERT_EQ(got.amax, want.amax) << label;
          ASSERT_EQ(got.row_scales, want.row_scales) << label;
          ASSERT_EQ(got.transposed, want.transposed) << label;
          ASSERT_EQ(got.dequantized, want.dequantized) << label;
        }
      }
    }
  }
}

// The outputs of blocks of 1x128 and of 128x1 from one reading, either or both.
std::vector<std::vector<uint8_t>> run_lines(Context& on, const QuantizeCase& c, const QuantizeVariant& v,
                                            DType type, const std::vector<double>& source, bool by_row,
                                            bool by_column) {
  Memory memory(on);
  const auto elements = static_cast<size_t>(c.rows * c.columns);
  QuantizeArgs args;
  args.format = v.format;
  args.rule = v.rule;
  args.block = v.block;
  args.group_rows = c.group_rows;
  void* x = memory.make(elements * dtype_size(type), [&](uint8_t* to) {
    for (size_t i = 0; i < elements; ++i) encode(source[i], type, to + i * dtype_size(type));
  });
  args.x_RC = TensorView(x, type, Shape{c.rows, c.columns});
  if (!c.offsets.empty()) {
    const size_t bytes = c.offsets.size() * sizeof(int64_t);
    void* offsets = memory.make(bytes, [&](uint8_t* to) { std::memcpy(to, c.offsets.data(), bytes); });
    args.offsets_E1 = TensorView(offsets, DType::kI64, Shape{static_cast<int64_t>(c.offsets.size())});
  }
  const Shape row_scales{c.columns / 128, row_scales_stride(c.rows)};
  const Shape column_scales{(c.rows + 127) / 128, c.columns};
  const auto output = [&](DType dtype, const Shape& shape) {
    return TensorView(memory.make(static_cast<size_t>(shape.num_elements()) * dtype_size(dtype)), dtype,
                      shape);
  };
  std::vector<TensorView> outputs;
  if (by_row) {
    outputs.push_back(args.data_RC = output(DType::kU8, args.x_RC.shape));
    outputs.push_back(args.row_scales_BR = output(DType::kF32, row_scales));
  }
  if (by_column) {
    outputs.push_back(args.column_codes_CR = output(DType::kU8, Shape{c.columns, c.rows}));
    outputs.push_back(args.column_scales_BC = output(DType::kF32, column_scales));
  }
  quantize(on, args);
  std::vector<std::vector<uint8_t>> all;
  for (const TensorView& view : outputs) all.push_back(memory.read(view.data));
  return all;
}

TEST_F(CudaQuantizeTest, RowsAndColumnsFromOneReadingAreThoseOfTheCpu) {
  Context cpu;
  for (const QuantizeCase& c : kColumnCases) {
    for (const DType type : kComputeTypes) {
      std::vector<double> source = padded_values(c);
      for (double& value : source) {
        uint8_t bytes[8];
        encode(value, type, bytes);
        value = decode(bytes, type);
      }
      for (const ScaleRule rule : {ScaleRule::kFloat, ScaleRule::kPowerOfTwo}) {
        for (const Fp8Format format : {Fp8Format::kE4M3, Fp8Format::kE5M2}) {
          const QuantizeVariant v{format, rule, {1, 128}};
          for (const auto& [by_row, by_column] :
               {std::pair{true, true}, std::pair{true, false}, std::pair{false, true}}) {
            EXPECT_EQ(run_lines(ctx(), c, v, type, source, by_row, by_column),
                      run_lines(cpu, c, v, DType::kF32, source, by_row, by_column))
                << testing::PrintToString(c) << " " << dtype_name(type) << " rule " << static_cast<int>(rule)
                << " format " << static_cast<int>(format) << (by_row ? " by row" : "")
                << (by_column ? " by column" : "");
          }
        }
      }
    }
  }
}

// The codec alone, on the device: with one block a tensor of scale 1, all bf16 values and all fp32 ties.
TEST_F(CudaQuantizeTest, EveryBf16AndEveryTieIsEncodedAsOnTheCpu) {
  Context cpu;
  for (const Fp8Format format : {Fp8Format::kE4M3, Fp8Format::kE5M2}) {
    std::vector<double> values;
    for (int bits = 0; bits < 65536; ++bits) {
      values.push_back(static_cast<double>(float_from_bf16(static_cast<uint16_t>(bits))));
    }
    for (int code = 0; code < 256; ++code) {
      const float value = fp8::decode(static_cast<uint8_t>(code), format);
      const float next = fp8::decode(static_cast<uint8_t>(code + 1), format);
      for (const float at : {value, (value + next) / 2}) {
        for (const float near : {at, std::nextafterf(at, 0.0f), std::nextafterf(at, INFINITY)}) {
          values.push_back(static_cast<double>(near));
        }
      }
    }
    while (values.size() % 64 != 0) values.push_back(1.0);
    const QuantizeCase c{static_cast<int64_t>(values.size()) / 64, 64, {}, 0};
    const QuantizeVariant v{format, ScaleRule::kGiven, {0, 0}, 1.0};
    Context& gpu = with_scratch(quantize_scratch_bytes(Device::kCuda, 1));
    EXPECT_EQ(run(gpu, c, v, DType::kF32, values, 0), run(cpu, c, v, DType::kF32, values, 0));
  }
}

TEST_F(CudaQuantizeTest, DelayedScalesAreThoseOfTheCpu) {
  constexpr int64_t kSteps = 5, kTensors = 300;
  Context cpu;
  for (const bool most_recent : {false, true}) {
    for (const bool power_of_two : {false, true}) {
      std::vector<double> amax = normals(1, kSteps * kTensors, DType::kF32, 100.0);
      for (double& value : amax) value = std::abs(value);
      for (size_t i = 0; i < amax.size(); i += 7) amax[i] = 0;
      for (size_t i = 3; i < amax.size(); i += 31) amax[i] = INFINITY;
      std::vector<uint8_t> formats(kTensors);
      for (size_t i = 0; i < formats.size(); ++i) formats[i] = i % 2;
      GpuBytes gpu_formats(ctx(), kTensors);
      std::copy(formats.begin(), formats.end(), gpu_formats.host().begin());
      gpu_formats.upload();
      Tensor<float> host_amax(Shape{kSteps, kTensors}), host_scales(Shape{kTensors});
      GpuTensor gpu_amax(ctx(), DType::kF32, Shape{kSteps, kTensors}),
          gpu_scales(ctx(), DType::kF32, Shape{kTensors});
      host_amax.set(amax);
      gpu_amax.set(amax);
      host_scales.fill(3);
      gpu_scales.fill(3);
      UpdateDelayedScalesArgs args;
      args.margin = 1;
      args.most_recent = most_recent;
      args.power_of_two = power_of_two;
      for (int step = 0; step < 3; ++step) {
        args.amax_HN = host_amax.view();
        args.scales_N = host_scales.view();
        args.formats_N = TensorView(formats.data(), DType::kU8, Shape{kTensors});
        update_delayed_scales(cpu, args);
        args.amax_HN = gpu_amax.view();
        args.scales_N = gpu_scales.view();
        args.formats_N = TensorView(gpu_formats.data(), DType::kU8, Shape{kTensors});
        update_delayed_scales(ctx(), args);
      }
      EXPECT_EQ(gpu_amax.values(), host_amax.values());
      EXPECT_EQ(gpu_scales.values(), host_scales.values());
    }
  }
}

}  // namespace
}  // namespace biomoe::test
