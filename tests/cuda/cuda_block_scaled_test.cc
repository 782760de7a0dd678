// Products of experts on E4M3 codes against the same products in double on what the codes stand for.
#include <numeric>
#include <optional>

#include "biomoe/ops/gemm.h"
#include "biomoe/ops/grouped_gemm.h"
#include "biomoe/ops/quantize.h"
#include "tests/cuda/gpu_expert_rows.h"
#include "tests/ref/grouped_gemm.h"

namespace biomoe::test {
namespace {

constexpr int64_t kBlock = 128;

struct Case {
  std::vector<int64_t> counts;  // rows of the experts
  int64_t in, out;
  ScaleRule rule = ScaleRule::kPowerOfTwo;
  int64_t row_step = 1;  // every so many rows are compared
};

void PrintTo(const Case& c, std::ostream* to) {
  *to << testing::PrintToString(c.counts) << " rows, " << c.in << " -> " << c.out;
}

// A matrix on the host: codes, their scales as quantize() has them, and what they stand for.
struct Codes {
  std::vector<double> codes, scales, values;
};

Codes quantized(const std::vector<double>& source, int64_t rows, int64_t columns, int64_t group_rows,
                BlockShape block, ScaleRule rule) {
  Context cpu;
  Tensor<float> x(Shape{rows, columns}), y(x.shape());
  x.set(source);
  QuantizeArgs args{.x_RC = x.view(), .rule = rule, .block = block, .group_rows = group_rows};
  const BlockGrid grid = block_grid(args);
  std::vector<uint8_t> codes(source.size() + 1);
  Tensor<float> scales(Shape{grid.bands(), grid.block_columns()});
  args.data_RC = TensorView(codes.data(), DType::kU8, x.shape());
  args.scales_NB = scales.view();
  args.dequantized_RC = y.view();
  quantize(cpu, args);
  codes.pop_back();
  return {{codes.begin(), codes.end()}, scales.values(), y.values()};
}

// [groups, rows, columns] to [groups, columns, rows].
std::vector<double> transposed(const std::vector<double>& x, int64_t groups, int64_t rows, int64_t columns) {
  std::vector<double> y(x.size());
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; ++c) {
        y[static_cast<size_t>((g * columns + c) * rows + r)] =
            x[static_cast<size_t>((g * rows + r) * columns + c)];
      }
    }
  }
  return y;
}

class CudaBlockScaledTest : public HopperTest, public testing::WithParamInterface<Case> {
 protected:
  void SetUp() override {
    HopperTest::SetUp();
    if (!IsSkipped()) rows_.emplace(ctx(), GetParam().counts);
  }

  // The mean relative error of sums of positive products, of the rows and weights set.
  double mean_error(const Case& c);

  int64_t experts() const { return rows_->experts(); }
  int64_t used_rows() const { return rows_->used(); }

  // On the GPU, as the products take them; what follows the used rows is poison.
  struct Operands {
    Codes rows, weights;  // values of weights as the product reads them, [E, N, K]
    std::unique_ptr<GpuTensor> row_codes, row_scales, weight_codes, weight_scales;
    BlockScaledCodes codes() const {
      return {.rows_RK = row_codes->view(),
              .row_scales_BR = row_scales->view(),
              .weights_ENK = weight_codes->view(),
              .weight_scales_NB = weight_scales->view()};
    }
  };

  // Rows [R, K]; weights [E, out, in], of which K is `in`, or `out` where they are transposed.
  Operands operands(const std::vector<double>& rows, const std::vector<double>& weights, int64_t out,
                    int64_t in, bool transpose, ScaleRule rule) {
    Operands to;
    const int64_t k = transpose ? out : in, n = transpose ? in : out, blocks = k / kBlock;
    to.rows = quantized(rows, used_rows(), k, 0, {1, kBlock}, rule);
    to.weights = quantized(weights, experts() * out, in, out, {kBlock, kBlock}, rule);
    if (transpose) {
      to.weights.codes = transposed(to.weights.codes, experts(), out, in);
      to.weights.values = transposed(to.weights.values, experts(), out, in);
    }
    to.row_codes = std::make_unique<GpuTensor>(ctx(), DType::kU8, Shape{rows_->capacity(), k});
    to.row_codes->set(rows_->with_spare(to.rows.codes, k, 255.0));
    const int64_t stride = row_scales_stride(rows_->capacity());
    to.row_scales = std::make_unique<GpuTensor>(ctx(), DType::kF32, Shape{blocks, stride});
    std::vector<double> scales(static_cast<size_t>(blocks * stride), std::nan(""));
    for (int64_t r = 0; r < used_rows(); ++r) {
      for (int64_t b = 0; b < blocks; ++b) {
        scales[static_cast<size_t>(b * stride + r)] = to.rows.scales[static_cast<size_t>(r * blocks + b)];
      }
    }
    to.row_scales->set(scales);
    to.weight_codes = std::make_unique<GpuTensor>(ctx(), DType::kU8, Shape{experts(), n, k});
    to.weight_codes->set(to.weights.codes);
    to.weight_scales =
        std::make_unique<GpuTensor>(ctx(), DType::kF32, Shape{experts() * (out / kBlock + 1), in / kBlock});
    to.weight_scales->set(to.weights.scales);
    return to;
  }

  // Of a weight gradient, transposed; what follows the used rows is poison.
  struct Columns {
    Codes host;
    std::unique_ptr<GpuTensor> codes, scales;
  };

  Columns columns(const std::vector<double>& x, int64_t width, ScaleRule rule) {
    Columns to;
    to.host = quantized(x, used_rows(), width, 0, {kBlock, 1}, rule);
    std::vector<double> codes(static_cast<size_t>(width * rows_->capacity()), 255.0);
    for (int64_t r = 0; r < used_rows(); ++r) {
      for (int64_t c = 0; c < width; ++c) {
        codes[static_cast<size_t>(c * rows_->capacity() + r)] =
            to.host.codes[static_cast<size_t>(r * width + c)];
      }
    }
    to.codes = std::make_unique<GpuTensor>(ctx(), DType::kU8, Shape{width, rows_->capacity()});
    to.codes->set(codes);
    std::vector<double> scales = to.host.scales;
    scales.resize(static_cast<size_t>(rows_->capacity() / kBlock * width), std::nan(""));
    to.scales = std::make_unique<GpuTensor>(ctx(), DType::kF32, Shape{rows_->capacity() / kBlock, width});
    to.scales->set(scales);
    return to;
  }

  std::vector<double> product(const Operands& of, int64_t n, int64_t k) const {
    std::vector<double> y(static_cast<size_t>(used_rows() * n), 0.0);
    for (int64_t e = 0; e < experts(); ++e) {
      const int64_t begin = rows_->offsets()[static_cast<size_t>(e)];
      for (int64_t r = begin; r < begin + rows_->counts()[static_cast<size_t>(e)]; r += GetParam().row_step) {
        const double* x = of.rows.values.data() + r * k;
        for (int64_t i = 0; i < n; ++i) {
          const double* w = of.weights.values.data() + (e * n + i) * k;
          y[static_cast<size_t>(r * n + i)] = std::inner_product(x, x + k, w, 0.0);
        }
      }
    }
    return y;
  }

  void expect_rows(GpuTensor& got, const std::vector<double>& want, int64_t columns, const char* what) {
    rows_->expect(got.values(), want, columns, DType::kBF16, what, GetParam().row_step);
  }

  std::optional<GpuExpertRows> rows_;
};

constexpr DType kType = DType::kBF16;

TEST_P(CudaBlockScaledTest, ForwardAndDgrad) {
  const auto& [counts, in, out, rule, step] = GetParam();
  const auto w = normals(1, experts() * out * in, kType, 0.1);
  // What is not read of the operands themselves: poison.
  GpuTensor w_shape(ctx(), kType, Shape{experts(), out, in});
  for (const bool dgrad : {false, true}) {
    const int64_t n = dgrad ? in : out, k = dgrad ? out : in;
    const Operands of = operands(rows_->normal_rows(2, k, kType), w, out, in, dgrad, rule);
    GpuTensor rows_shape(ctx(), kType, Shape{rows_->capacity(), k}),
        y(ctx(), kType, Shape{rows_->capacity(), n});
    const GroupedGemmArgs args{.x_RI = dgrad ? y.view() : rows_shape.view(),
                               .w_EOI = w_shape.view(),
                               .y_RO = dgrad ? rows_shape.view() : y.view(),
                               .offsets_E1 = rows_->offsets_E1(),
                               .rows_E = rows_->rows_E(),
                               .codes = of.codes()};
    const auto run = [&] { dgrad ? grouped_gemm_dgrad(ctx(), args) : grouped_gemm_forward(ctx(), args); };
    run();
    expect_rows(y, product(of, n, k), n, dgrad ? "dgrad" : "forward");
    const std::vector<uint8_t> first = y.bytes();
    y.poison();
    run();
    EXPECT_EQ(first, y.bytes()) << "not the same twice";
    if (rule != ScaleRule::kPowerOfTwo) continue;
    // The emulation: what the codes stand for, which BF16 holds.
    rows_shape.set(rows_->with_spare(of.rows.values, k));
    w_shape.set(dgrad ? transposed(of.weights.values, experts(), in, out) : of.weights.values);
    y.poison();
    GroupedGemmArgs emulated = args;
    emulated.codes = {};
    dgrad ? grouped_gemm_dgrad(ctx(), emulated) : grouped_gemm_forward(ctx(), emulated);
    expect_rows(y, product(of, n, k), n, dgrad ? "emulated dgrad" : "emulated forward");
  }
}

// Of sizes whose reference in double does not take minutes.
class CudaBlockScaledWgradTest : public CudaBlockScaledTest {};

// Assigned in BF16 with sums of squares, and added to in both types.
TEST_P(CudaBlockScaledWgradTest, AssignsAndAdds) {
  const auto& [counts, in, out, rule, step] = GetParam();
  const Columns y = columns(rows_->normal_rows(1, out, kType), out, rule);
  const Columns x = columns(rows_->normal_rows(2, in, kType), in, rule);
  GpuTensor x_shape(ctx(), kType, Shape{rows_->capacity(), in}),
      y_shape(ctx(), kType, Shape{rows_->capacity(), out});
  const Shape shape{experts(), out, in};
  const std::vector<double> zeros(static_cast<size_t>(experts() * out * in), 0.0);
  const std::vector<double> product =
      ref::grouped_wgrad({in, out, rows_->offsets()}, y.host.values, x.host.values, zeros);
  GroupedGemmArgs args{.x_RI = x_shape.view(),
                       .w_EOI = {},
                       .y_RO = y_shape.view(),
                       .offsets_E1 = rows_->offsets_E1(),
                       .rows_E = rows_->rows_E(),
                       .column_codes = {.y_OR = y.codes->view(),
                                        .y_scales_BO = y.scales->view(),
                                        .x_IR = x.codes->view(),
                                        .x_scales_BI = x.scales->view()}};
  GpuTensor dw(ctx(), kType, shape);
  GpuTensor squares(ctx(), DType::kF32, Shape{wgrad_squares_count(Device::kCuda, experts(), out, in)});
  args.w_EOI = dw.view();
  args.squares_P = squares.view();
  grouped_gemm_wgrad(ctx(), args);
  EXPECT_CLOSE(dw.values(), product, DType::kBF16) << "assigned";
  const std::vector<double> stored = dw.values(), parts = squares.values();
  const double sum = std::inner_product(stored.begin(), stored.end(), stored.begin(), 0.0);
  EXPECT_NEAR(std::accumulate(parts.begin(), parts.end(), 0.0), sum, 1e-5 * sum);
  const std::vector<uint8_t> first = dw.bytes();
  dw.poison();
  grouped_gemm_wgrad(ctx(), args);
  EXPECT_EQ(first, dw.bytes()) << "not the same twice";
  args.accumulate = true;
  args.squares_P = {};
  const std::vector<double> before = normals(5, experts() * out * in, kType);
  std::vector<double> want = before;
  for (size_t i = 0; i < want.size(); ++i) want[i] += product[i];
  for (const DType type : {DType::kBF16, DType::kF32}) {
    GpuTensor sums(ctx(), type, shape);
    sums.set(before);
    args.w_EOI = sums.view();
    grouped_gemm_wgrad(ctx(), args);
    EXPECT_CLOSE(sums.values(), want, DType::kBF16) << dtype_name(type);
  }
}

const std::vector<Case> kCases{Case{{0, 1, 127, 128, 129, 64, 65, 0}, 256, 384},
                               Case{{0, 1, 127, 128, 129, 64, 65, 0}, 384, 128, ScaleRule::kFloat},
                               Case{{640}, 128, 128}, Case{{0, 0, 700, 0, 0}, 384, 256, ScaleRule::kFloat},
                               Case{{0, 0, 0}, 128, 256}, Case{std::vector<int64_t>(64, 3), 128, 256},
                               // Tiles one after the other of which a warpgroup has nothing but padding.
                               Case{{5, 3, 1, 64}, 512, 8192}};
INSTANTIATE_TEST_SUITE_P(Cases, CudaBlockScaledTest, testing::ValuesIn(kCases));
INSTANTIATE_TEST_SUITE_P(Cases, CudaBlockScaledWgradTest, testing::ValuesIn(kCases));
INSTANTIATE_TEST_SUITE_P(Large, CudaBlockScaledTest,
                         testing::Values(Case{{130, 60}, 2048, 1152, ScaleRule::kFloat, 7},
                                         // More tiles than multiprocessors, with epilogues between the
                                         // products of the next.
                                         Case{
                                             {2500, 130, 1, 1900}, 1536, 1792, ScaleRule::kPowerOfTwo, 101}));

// The same without experts: gemm() of codes, of rows that fill no tile.
class CudaCodesGemmTest : public HopperTest, public testing::WithParamInterface<int64_t> {
 protected:
  static constexpr int64_t kIn = 384, kOut = 256;

  std::unique_ptr<GpuTensor> on_gpu(DType type, const Shape& shape, const std::vector<double>& values) {
    auto to = std::make_unique<GpuTensor>(ctx(), type, shape);
    to->set(values);
    return to;
  }
  // c = a b with `args`, into a poisoned matrix.
  std::vector<double> product(GemmArgs args, const Shape& a, const Shape& b, const Shape& c) {
    GpuTensor first(ctx(), kType, a), second(ctx(), kType, b), result(ctx(), kType, c);  // poison
    args.a = first.view();
    args.b = second.view();
    args.c = result.view();
    gemm(ctx(), args);
    return result.values();
  }
};

TEST_P(CudaCodesGemmTest, ForwardAndDgrad) {
  const int64_t T = GetParam();
  const Codes w = quantized(normals(1, kOut * kIn, kType, 0.1), kOut, kIn, kOut, {kBlock, kBlock},
                            ScaleRule::kPowerOfTwo);
  const auto scales_w = on_gpu(DType::kF32, Shape{kOut / kBlock + 1, kIn / kBlock}, w.scales);
  for (const bool dgrad : {false, true}) {
    const int64_t k = dgrad ? kOut : kIn, n = dgrad ? kIn : kOut, blocks = k / kBlock;
    const Codes x = quantized(normals(2, T * k, kType), T, k, 0, {1, kBlock}, ScaleRule::kPowerOfTwo);
    std::vector<double> scales(static_cast<size_t>(blocks * row_scales_stride(T)), std::nan(""));
    for (int64_t r = 0; r < T * blocks; ++r) {
      scales[static_cast<size_t>(r % blocks * row_scales_stride(T) + r / blocks)] =
          x.scales[static_cast<size_t>(r)];
    }
    const auto codes_x = on_gpu(DType::kU8, Shape{T, k}, x.codes);
    const auto scales_x = on_gpu(DType::kF32, Shape{blocks, row_scales_stride(T)}, scales);
    const auto codes_w =
        on_gpu(DType::kU8, Shape{1, n, k}, dgrad ? transposed(w.codes, 1, kOut, kIn) : w.codes);
    const std::vector<double> got = product({.a = {},
                                             .b = {},
                                             .c = {},
                                             .transpose_b = !dgrad,
                                             .codes = {.rows_RK = codes_x->view(),
                                                       .row_scales_BR = scales_x->view(),
                                                       .weights_ENK = codes_w->view(),
                                                       .weight_scales_NB = scales_w->view()}},
                                            Shape{T, k}, Shape{kOut, kIn}, Shape{T, n});
    const ref::ExpertSizes sizes{kIn, kOut, {0, T}};
    EXPECT_CLOSE(got,
                 dgrad ? ref::grouped_dgrad(sizes, x.values, w.values)
                       : ref::grouped_forward(sizes, x.values, w.values),
                 DType::kBF16)
        << (dgrad ? "dgrad" : "forward");
  }
}

// Of a multiple of 16 rows.
class CudaCodesWgradTest : public CudaCodesGemmTest {};

TEST_P(CudaCodesWgradTest, MultipliesColumns) {
  const int64_t T = GetParam();
  const Codes y = quantized(normals(1, T * kOut, kType), T, kOut, 0, {kBlock, 1}, ScaleRule::kPowerOfTwo);
  const Codes x = quantized(normals(2, T * kIn, kType), T, kIn, 0, {kBlock, 1}, ScaleRule::kPowerOfTwo);
  const int64_t blocks = (T + kBlock - 1) / kBlock;
  const auto codes_y = on_gpu(DType::kU8, Shape{kOut, T}, transposed(y.codes, 1, T, kOut));
  const auto codes_x = on_gpu(DType::kU8, Shape{kIn, T}, transposed(x.codes, 1, T, kIn));
  const auto scales_y = on_gpu(DType::kF32, Shape{blocks, kOut}, y.scales);
  const auto scales_x = on_gpu(DType::kF32, Shape{blocks, kIn}, x.scales);
  const std::vector<double> got = product({.a = {},
                                           .b = {},
                                           .c = {},
                                           .transpose_a = true,
                                           .column_codes = {.y_OR = codes_y->view(),
                                                            .y_scales_BO = scales_y->view(),
                                                            .x_IR = codes_x->view(),
                                                            .x_scales_BI = scales_x->view()}},
                                          Shape{T, kOut}, Shape{T, kIn}, Shape{kOut, kIn});
  const std::vector<double> zeros(static_cast<size_t>(kOut * kIn), 0.0);
  EXPECT_CLOSE(got, ref::grouped_wgrad({kIn, kOut, {0, T}}, y.values, x.values, zeros), DType::kBF16);
}

INSTANTIATE_TEST_SUITE_P(Rows, CudaCodesGemmTest, testing::Values(1, 16, 127, 128, 208, 1040));
INSTANTIATE_TEST_SUITE_P(Rows, CudaCodesWgradTest, testing::Values(16, 128, 208, 1040));

double CudaBlockScaledTest::mean_error(const Case& c) {
  auto x = rows_->normal_rows(2, c.in, kType), w = normals(1, experts() * c.out * c.in, kType);
  for (auto* all : {&x, &w}) {
    for (double& value : *all) value = std::abs(value);
  }
  const Operands of = operands(x, w, c.out, c.in, false, c.rule);
  GpuTensor rows_shape(ctx(), kType, Shape{rows_->capacity(), c.in});
  GpuTensor w_shape(ctx(), kType, Shape{experts(), c.out, c.in}),
      y(ctx(), kType, Shape{rows_->capacity(), c.out});
  grouped_gemm_forward(ctx(), {.x_RI = rows_shape.view(),
                               .w_EOI = w_shape.view(),
                               .y_RO = y.view(),
                               .offsets_E1 = rows_->offsets_E1(),
                               .rows_E = rows_->rows_E(),
                               .codes = of.codes()});
  const std::vector<double> want = product(of, c.out, c.in), got = y.values();
  double error = 0;
  for (size_t i = 0; i < want.size(); ++i) error += got[i] / want[i] - 1.0;
  return error / static_cast<double>(want.size());
}

// The tensor cores cut what they add off, so that sums of positive products come out too small; within a
// block of 128 only: in a long row no more than in a short one. Roundings of the outputs cancel in the mean.
class CudaBlockScaledPrecisionTest : public CudaBlockScaledTest {};

TEST_P(CudaBlockScaledPrecisionTest, LongSumsAreAddedInFp32) {
  Case c = GetParam();
  const double one_block = mean_error(c);
  c.in = 64 * kBlock;
  const double many = mean_error(c);
  RecordProperty("one_block", fmt::format("{:.2e}", one_block));
  RecordProperty("many_blocks", fmt::format("{:.2e}", many));
  EXPECT_LT(std::abs(one_block), 1e-3);
  EXPECT_LE(std::abs(many), 1.5 * std::abs(one_block)) << many << " against " << one_block;
}

INSTANTIATE_TEST_SUITE_P(Long, CudaBlockScaledPrecisionTest, testing::Values(Case{{128}, kBlock, 128}));

}  // namespace
}  // namespace biomoe::test
