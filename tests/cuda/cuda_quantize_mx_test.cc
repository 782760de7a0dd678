// What quantize() gives Blackwell's products, on the GPU against the CPU in every byte; on any GPU.
#include "biomoe/quant/mx_grid_scales.h"
#include "tests/cuda/gpu_test.h"
#include "tests/ops/quantize_cases.h"

namespace biomoe::test {
namespace {

struct Outputs {
  std::vector<double> codes, scales;
};

class CudaQuantizeMxTest : public GpuTest, public testing::WithParamInterface<QuantizeCase> {
 protected:
  // Of blocks of one row, their codes and scales; of one column, those of the transposed matrix.
  static QuantizeArgs args(const TensorView& x, bool by_column, ScaleRule rule) {
    return {.x_RC = x,
            .rule = rule,
            .block = by_column ? BlockShape{32, 1} : BlockShape{1, 32},
            .group_rows = GetParam().group_rows};
  }
  static Shape codes_shape(const QuantizeArgs& args) {
    const int64_t groups = args.group_rows > 0 ? args.x_RC.shape[0] / args.group_rows : 1;
    const int64_t rows = args.x_RC.shape[0] / groups, columns = args.x_RC.shape[1];
    return args.block.columns == 1 ? Shape{groups * columns, rows} : args.x_RC.shape;
  }
  static void set_codes(QuantizeArgs& args, const TensorView& codes) {
    (args.block.columns == 1 ? args.transposed_CR : args.data_RC) = codes;
  }

  static Outputs on_cpu(const std::vector<double>& source, bool by_column, ScaleRule rule) {
    const QuantizeCase& c = GetParam();
    Context cpu;
    Tensor<float> x(Shape{c.rows, c.columns});
    x.set(source);
    Tensor<int64_t> offsets(Shape{static_cast<int64_t>(c.offsets.size())});
    offsets.set({c.offsets.begin(), c.offsets.end()});
    QuantizeArgs asked = args(x.view(), by_column, rule);
    if (!c.offsets.empty()) asked.offsets_E1 = offsets.view();
    std::vector<uint8_t> codes(source.size() + 1, 0xff);
    std::vector<uint8_t> scales(static_cast<size_t>(MxGridScales(block_grid(asked)).bytes()) + 1, 0xff);
    set_codes(asked, TensorView(codes.data(), DType::kU8, codes_shape(asked)));
    asked.mx_scales_S = TensorView(scales.data(), DType::kU8, Shape{static_cast<int64_t>(scales.size()) - 1});
    quantize(cpu, asked);
    return {{codes.begin(), codes.end() - 1}, {scales.begin(), scales.end() - 1}};
  }

  // Rows of x lie `padding` elements apart, which is what takes kernels from vectors to single elements.
  Outputs on_gpu(const std::vector<double>& source, DType type, int64_t padding, bool by_column,
                 ScaleRule rule) {
    const QuantizeCase& c = GetParam();
    GpuTensor x(ctx(), type, Shape{c.rows, c.columns}, padding);
    x.set(source);
    GpuTensor offsets(ctx(), DType::kI64, Shape{static_cast<int64_t>(c.offsets.size())});
    offsets.set({c.offsets.begin(), c.offsets.end()});
    QuantizeArgs asked = args(x.view(), by_column, rule);
    if (!c.offsets.empty()) asked.offsets_E1 = offsets.view();
    GpuTensor codes(ctx(), DType::kU8, codes_shape(asked));
    GpuTensor scales(ctx(), DType::kU8, Shape{MxGridScales(block_grid(asked)).bytes()});
    set_codes(asked, codes.view());
    asked.mx_scales_S = scales.view();
    quantize(ctx(), asked);
    EXPECT_TRUE(codes.padding_untouched());
    EXPECT_TRUE(scales.padding_untouched());
    return {codes.values(), scales.values()};
  }
};

TEST_P(CudaQuantizeMxTest, IsThatOfTheCpuInEveryByte) {
  for (const DType type : kComputeTypes) {
    std::vector<double> source = padded_values(GetParam());
    for (double& value : source) {
      uint8_t bytes[8];
      encode(value, type, bytes);
      value = decode(bytes, type);
    }
    for (const ScaleRule rule : {ScaleRule::kMxUp, ScaleRule::kMxFloor}) {
      for (const bool by_column : {false, true}) {
        const Outputs want = on_cpu(source, by_column, rule);
        for (const int64_t padding : {0, 3}) {
          const Outputs got = on_gpu(source, type, padding, by_column, rule);
          const auto label = testing::Message()
                             << dtype_name(type) << (by_column ? " by column" : " by row") << " rule "
                             << static_cast<int>(rule) << " padding " << padding;
          ASSERT_EQ(got.codes, want.codes) << label;
          ASSERT_EQ(got.scales, want.scales) << label;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, CudaQuantizeMxTest, testing::ValuesIn(kMxCases));

}  // namespace
}  // namespace biomoe::test
