// Products of MX codes against the same products in double on what the codes stand for. Skipped but on GPUs
// of compute capability 10.0 with a build that has the kernels.
#include "biomoe/ops/gemm.h"
#include "biomoe/ops/grouped_gemm.h"
#include "biomoe/ops/quantize.h"
#include "biomoe/quant/mx_grid_scales.h"
#include "tests/cuda/gpu_test.h"
#include "tests/ref/grouped_gemm.h"

namespace biomoe::test {
namespace {

constexpr DType kType = DType::kBF16;
constexpr int64_t kSegment = 128;
constexpr int64_t kSpareRows = 128;  // belong to nobody

struct Case {
  std::vector<int64_t> counts;  // rows of the experts; empty: no experts, `rows` of them
  int64_t in, out;
  int64_t rows = 0;
};

void PrintTo(const Case& c, std::ostream* to) {
  *to << testing::PrintToString(c.counts) << " rows, " << c.in << " -> " << c.out;
}

// An operand on the GPU, quantised there, and what its codes stand for, as it lay before.
struct Operand {
  std::unique_ptr<GpuTensor> codes, scales;
  std::vector<double> values;
};

class CudaMxProductsTest : public GpuTest, public testing::WithParamInterface<Case> {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    if (!device_info(Device::kCuda).mx_products) {
      GTEST_SKIP() << "products of MX codes need compute capability 10.0 and BIOMOE_SM100=ON";
    }
    const Case& c = GetParam();
    for (const int64_t count : c.counts) {
      offsets_.push_back(offsets_.back() + (count + kSegment - 1) / kSegment * kSegment);
    }
    if (c.counts.empty()) offsets_.push_back(c.rows);
    capacity_ = offsets_.back() + (c.counts.empty() ? 0 : kSpareRows);
    device_offsets_ = std::make_unique<GpuTensor>(ctx(), DType::kI64, Shape{experts() + 1});
    device_offsets_->set({offsets_.begin(), offsets_.end()});
  }

  int64_t experts() const { return static_cast<int64_t>(offsets_.size()) - 1; }
  int64_t used_rows() const { return offsets_.back(); }
  bool grouped() const { return !GetParam().counts.empty(); }

  // Normal numbers in real rows, zeros in padding, and NaN in rows that belong to nobody.
  std::vector<double> row_values(uint64_t seed, int64_t columns) const {
    std::vector<double> x = normals(seed, capacity_ * columns, kType);
    for (size_t e = 0; e < GetParam().counts.size(); ++e) {
      const int64_t end = offsets_[e] + GetParam().counts[e];
      std::fill(x.begin() + end * columns, x.begin() + offsets_[e + 1] * columns, 0.0);
    }
    std::fill(x.begin() + used_rows() * columns, x.end(), std::nan(""));
    return x;
  }

  // `by_column`: for a product that sums over rows. group_rows > 0: weights, one group an expert.
  Operand operand(const std::vector<double>& source, int64_t rows, int64_t columns, bool by_column,
                  int64_t group_rows) {
    Operand to;
    const int64_t groups = group_rows > 0 ? rows / group_rows : 1;
    GpuTensor x(ctx(), kType, Shape{rows, columns}), values(ctx(), kType, Shape{rows, columns});
    x.set(source);
    QuantizeArgs args{.x_RC = x.view(),
                      .block = by_column ? BlockShape{32, 1} : BlockShape{1, 32},
                      .group_rows = group_rows,
                      .dequantized_RC = values.view()};
    if (group_rows == 0 && grouped()) args.offsets_E1 = device_offsets_->view();
    const Shape shape = by_column ? Shape{groups * columns, rows / groups} : Shape{rows, columns};
    to.codes = std::make_unique<GpuTensor>(ctx(), DType::kU8, shape);
    to.scales = std::make_unique<GpuTensor>(ctx(), DType::kU8, Shape{MxGridScales(block_grid(args)).bytes()});
    (by_column ? args.transposed_CR : args.data_RC) = to.codes->view();
    args.mx_scales_S = to.scales->view();
    quantize(ctx(), args);
    to.values = values.values();
    return to;
  }

  // Codes of weights as [E, n, k].
  static TensorView with_experts(const TensorView& codes, int64_t experts) {
    return {codes.data, codes.dtype, Shape{experts, codes.shape[0] / experts, codes.shape[1]}};
  }

  std::vector<double> used(const std::vector<double>& rows, int64_t columns) const {
    return {rows.begin(), rows.begin() + used_rows() * columns};
  }

  ref::ExpertSizes sizes() const { return {GetParam().in, GetParam().out, offsets_}; }

  std::vector<int64_t> offsets_{0};
  int64_t capacity_ = 0;
  std::unique_ptr<GpuTensor> device_offsets_;
};

TEST_P(CudaMxProductsTest, ForwardAndDgrad) {
  const Case& c = GetParam();
  const std::vector<double> w = normals(1, experts() * c.out * c.in, kType, 0.1);
  for (const bool dgrad : {false, true}) {
    const int64_t n = dgrad ? c.in : c.out, k = dgrad ? c.out : c.in;
    const Operand rows = operand(row_values(2, k), capacity_, k, false, 0);
    const Operand weights = operand(w, experts() * c.out, c.in, dgrad, c.out);
    const MxCodes codes{.a = rows.codes->view(),
                        .a_scales = rows.scales->view(),
                        .b = with_experts(weights.codes->view(), experts()),
                        .b_scales = weights.scales->view()};
    GpuTensor poison(ctx(), kType, Shape{capacity_, k}), got(ctx(), kType, Shape{capacity_, n});
    GpuTensor w_poison(ctx(), kType, Shape{experts(), c.out, c.in});
    if (grouped()) {
      const GroupedGemmArgs args{.x_RI = dgrad ? got.view() : poison.view(),
                                 .w_EOI = w_poison.view(),
                                 .y_RO = dgrad ? poison.view() : got.view(),
                                 .offsets_E1 = device_offsets_->view(),
                                 .mx_codes = codes};
      dgrad ? grouped_gemm_dgrad(ctx(), args) : grouped_gemm_forward(ctx(), args);
    } else {
      GpuTensor matrix(ctx(), kType, Shape{c.out, c.in});
      gemm(ctx(), {.a = poison.view(),
                   .b = matrix.view(),
                   .c = got.view(),
                   .transpose_b = !dgrad,
                   .mx_codes = codes});
    }
    const std::vector<double> all = got.values();
    const std::vector<double> x = used(rows.values, k);
    EXPECT_CLOSE(used(all, n),
                 dgrad ? ref::grouped_dgrad(sizes(), x, weights.values)
                       : ref::grouped_forward(sizes(), x, weights.values),
                 kType)
        << (dgrad ? "dgrad" : "forward");
    EXPECT_TRUE(
        std::all_of(all.begin() + used_rows() * n, all.end(), [](double v) { return std::isnan(v); }));
  }
}

// Assigned, and added to, in both types.
TEST_P(CudaMxProductsTest, Wgrad) {
  const Case& c = GetParam();
  const Operand y = operand(row_values(3, c.out), capacity_, c.out, true, 0);
  const Operand x = operand(row_values(4, c.in), capacity_, c.in, true, 0);
  const MxCodes codes{
      .a = y.codes->view(), .a_scales = y.scales->view(), .b = x.codes->view(), .b_scales = x.scales->view()};
  GpuTensor x_poison(ctx(), kType, Shape{capacity_, c.in}), y_poison(ctx(), kType, Shape{capacity_, c.out});
  const std::vector<double> before = normals(5, experts() * c.out * c.in, kType);
  for (const bool accumulate : {false, true}) {
    const std::vector<double> want =
        ref::grouped_wgrad(sizes(), used(y.values, c.out), used(x.values, c.in),
                           accumulate ? before : std::vector<double>(before.size(), 0.0));
    for (const DType type : {DType::kBF16, DType::kF32}) {
      GpuTensor dw(ctx(), type, grouped() ? Shape{experts(), c.out, c.in} : Shape{c.out, c.in});
      if (accumulate) dw.set(before);
      if (grouped()) {
        grouped_gemm_wgrad(ctx(), {.x_RI = x_poison.view(),
                                   .w_EOI = dw.view(),
                                   .y_RO = y_poison.view(),
                                   .offsets_E1 = device_offsets_->view(),
                                   .accumulate = accumulate,
                                   .mx_codes = codes});
      } else {
        gemm(ctx(), {.a = y_poison.view(),
                     .b = x_poison.view(),
                     .c = dw.view(),
                     .transpose_a = true,
                     .accumulate = accumulate,
                     .mx_codes = codes});
      }
      EXPECT_CLOSE(dw.values(), want, kType) << dtype_name(type) << (accumulate ? " added" : " assigned");
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, CudaMxProductsTest,
                         testing::Values(Case{{0, 1, 127, 128, 129, 64, 65, 0}, 256, 384},
                                         Case{{640}, 128, 128}, Case{{0, 0, 700, 0, 0}, 160, 96},
                                         Case{{0, 0, 0}, 128, 256},
                                         Case{std::vector<int64_t>(64, 3), 128, 256},
                                         Case{{130, 60}, 2048, 1152}, Case{{}, 288, 160, 48},
                                         Case{{}, 384, 256, 1040}));

// Elsewhere they are refused in one line that says what to do.
TEST(CudaMxProducts, RefusedWhereThereAreNone) {
  BIOMOE_REQUIRE_GPU();
  if (device_info(Device::kCuda).mx_products) GTEST_SKIP() << "this GPU has products of MX codes";
  GpuContext gpu;
  GpuTensor a(*gpu, kType, Shape{128, 32}), b(*gpu, kType, Shape{64, 32}), c(*gpu, kType, Shape{128, 64});
  GpuTensor codes(*gpu, DType::kU8, Shape{128, 32}), weights(*gpu, DType::kU8, Shape{1, 64, 32});
  GpuTensor scales(*gpu, DType::kU8, Shape{512});
  try {
    gemm(*gpu,
         {.a = a.view(),
          .b = b.view(),
          .c = c.view(),
          .transpose_b = true,
          .mx_codes = {
              .a = codes.view(), .a_scales = scales.view(), .b = weights.view(), .b_scales = scales.view()}});
    FAIL() << "not refused";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("BIOMOE_SM100"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("BF16"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace biomoe::test
