// Codes of more than 2^31 elements, in bytes: of rows and bands of rows at the ends and around element 2^31,
// against the same operation on these alone. Skipped, with the reason, where the GPU has not the memory.
#include "biomoe/ops/cuda_sizes.h"
#include "biomoe/ops/quantize.h"
#include "biomoe/ops/scaled_swiglu_codes.h"
#include "biomoe/quant/compact_bf16.h"
#include "tests/cuda/gpu_large.h"

namespace biomoe::test {
namespace {

constexpr int64_t kBand = 128;
constexpr int64_t kCodeRows = 4141 * kBand, kUsed = kCodeRows - kBand;  // the last band is nobody's
static_assert(kUsed * kWidth > int64_t{1} << 31);

// Of rows, so that the first element of the third is 2^31 where rows are kWidth wide, and of the second where
// they are twice that.
const std::vector<int64_t> kBands = {0, 2048, 4096, kUsed / kBand - 1};

class CudaLargeCodesTest : public GpuTest {
 protected:
  // The codes of x both ways, and their scales.
  struct Codes {
    Codes(Context& ctx, int64_t rows, int64_t columns)
        : row_codes(ctx, DType::kU8, {rows, columns}),
          row_scales(ctx, DType::kF32, {columns / kBand, row_scales_stride(rows)}),
          column_codes(ctx, DType::kU8, {columns, rows}),
          column_scales(ctx, DType::kF32, {rows / kBand, columns}) {}
    Large row_codes, row_scales, column_codes, column_scales;
  };
  // Band `b` of `got` holds the codes of `want`, which has no other.
  static void expect_rows(const Codes& got, const Codes& want, int64_t b) {
    const int64_t columns = got.row_codes.view().shape[1];
    ASSERT_TRUE(got.row_codes.elements(b * kBand * columns, kBand * columns) ==
                want.row_codes.elements(0, kBand * columns))
        << "codes of rows from " << b * kBand;
    const int64_t stride = got.row_scales.view().shape[1];
    for (int64_t block = 0; block < columns / kBand; ++block) {
      ASSERT_EQ(got.row_scales.elements(block * stride + b * kBand, kBand),
                want.row_scales.elements(block * kBand, kBand))
          << "scales of rows from " << b * kBand << ", block " << block;
    }
  }
  static void expect_columns(const Codes& got, const Codes& want, int64_t b) {
    const int64_t columns = got.column_codes.view().shape[0], rows = got.column_codes.view().shape[1];
    for (const int64_t c : {int64_t{0}, int64_t{1}, columns / 2, columns - 1}) {
      ASSERT_EQ(got.column_codes.elements(c * rows + b * kBand, kBand),
                want.column_codes.elements(c * kBand, kBand))
          << "column " << c << ", rows from " << b * kBand;
    }
    ASSERT_TRUE(got.column_scales.row(b) == want.column_scales.row(0))
        << "scales of columns, rows from " << b * kBand;
  }
  GpuTensor offsets(int64_t used) {
    GpuTensor bounds(ctx(), DType::kI64, Shape{2});
    bounds.set({0, static_cast<double>(used)});
    return bounds;
  }
  void copy(const TensorView& to, const TensorView& from) {
    copy_on_device(ctx(), to.data, from.data, from.bytes());
  }
};

TEST_F(CudaLargeCodesTest, BlockScalingOfRowsBeyond2To31Elements) {
  BIOMOE_REQUIRE_GPU_MEMORY(12);
  Large x(ctx(), DType::kBF16, {kCodeRows, kWidth});
  const Table table(ctx(), 1, kWidth);
  Filler filler(ctx(), 3, kCodeRows);
  filler.fill(table, x.view());
  const auto run = [&](const TensorView& of, const TensorView& bounds, const Codes& to) {
    quantize(ctx(), {.x_RC = of,
                     .rule = ScaleRule::kPowerOfTwo,
                     .block = {1, kBand},
                     .offsets_E1 = bounds,
                     .data_RC = to.row_codes.view(),
                     .row_scales_BR = to.row_scales.view(),
                     .column_codes_CR = to.column_codes.view(),
                     .column_scales_BC = to.column_scales.view()});
  };
  const Codes got(ctx(), kCodeRows, kWidth), want(ctx(), kBand, kWidth);
  const GpuTensor all = offsets(kUsed), one = offsets(kBand);
  run(x.view(), all.view(), got);
  for (const int64_t b : kBands) {
    run(x.view().rows(b * kBand, kBand), one.view(), want);
    expect_rows(got, want, b);
    expect_columns(got, want, b);
  }
  const Values poison(kWidth, 255.0);
  EXPECT_EQ(got.row_codes.row(kUsed), poison) << "rows of nobody";
  EXPECT_EQ(got.row_codes.row(kCodeRows - 1), poison) << "rows of nobody";
}

// MXFP8, by rows and by columns: codes, the transposed codes, scales, and what the codes stand for.
TEST_F(CudaLargeCodesTest, MxScalingOfRowsBeyond2To31Elements) {
  BIOMOE_REQUIRE_GPU_MEMORY(16);
  Large x(ctx(), DType::kBF16, {kCodeRows, kWidth}), values(ctx(), DType::kBF16, {kCodeRows, kWidth}),
      codes(ctx(), DType::kU8, {kCodeRows, kWidth}), transposed(ctx(), DType::kU8, {kWidth, kCodeRows});
  const Table table(ctx(), 1, kWidth);
  Filler filler(ctx(), 3, kCodeRows);
  filler.fill(table, x.view());
  Large one_values(ctx(), DType::kBF16, {kBand, kWidth}), one_codes(ctx(), DType::kU8, {kBand, kWidth}),
      one_transposed(ctx(), DType::kU8, {kWidth, kBand});
  for (const BlockShape block : {BlockShape{1, 32}, BlockShape{32, 1}}) {
    const bool by_column = block.columns == 1;
    SCOPED_TRACE(by_column ? "by column" : "by row");
    const auto shape_of_scales = [&](int64_t rows) {
      return by_column ? Shape{rows / 32, kWidth} : Shape{rows, kWidth / 32};
    };
    const Large scales(ctx(), DType::kU8, shape_of_scales(kCodeRows)),
        one_scales(ctx(), DType::kU8, shape_of_scales(kBand));
    const auto run = [&](const TensorView& of, const Large& to, const Large& turned, const Large& of_scales,
                         const Large& of_values) {
      quantize(ctx(), {.x_RC = of,
                       .block = block,
                       .data_RC = by_column ? TensorView() : to.view(),
                       .scales_NB = of_scales.view(),
                       .transposed_CR = by_column ? turned.view() : TensorView(),
                       .dequantized_RC = of_values.view()});
    };
    run(x.view(), codes, transposed, scales, values);
    for (const int64_t b : {int64_t{0}, int64_t{2048}, int64_t{4096}, kCodeRows / kBand - 1}) {
      run(x.view().rows(b * kBand, kBand), one_codes, one_transposed, one_scales, one_values);
      const int64_t rows_of_scales = by_column ? kBand / 32 : kBand;
      for (int64_t r = 0; r < rows_of_scales; ++r) {
        ASSERT_EQ(scales.row(b * rows_of_scales + r), one_scales.row(r)) << "scales of band " << b;
      }
      for (int64_t r = 0; r < kBand; ++r) {
        ASSERT_EQ(values.row(b * kBand + r), one_values.row(r)) << "values of band " << b;
        if (by_column) continue;
        ASSERT_EQ(codes.row(b * kBand + r), one_codes.row(r)) << "codes of band " << b;
      }
      for (const int64_t c : {int64_t{0}, int64_t{1}, kWidth / 2, kWidth - 1}) {
        if (!by_column) break;
        ASSERT_EQ(transposed.elements(c * kCodeRows + b * kBand, kBand),
                  one_transposed.elements(c * kBand, kBand))
            << "column " << c << " of band " << b;
      }
    }
  }
}

TEST_F(CudaLargeCodesTest, SwigluToCodesBeyond2To32Elements) {
  BIOMOE_REQUIRE_GPU_MEMORY(42);
  constexpr ScaleRule kRule = ScaleRule::kPowerOfTwo;
  constexpr int64_t kInterleave = cuda::kGateUpInterleave;
  struct Operands {
    Operands(Context& ctx, int64_t rows)
        : gate_up(ctx, DType::kBF16, {rows, 2 * kWidth}),
          dact(ctx, DType::kBF16, {rows, kWidth}),
          probs(ctx, DType::kF32, {rows}),
          dprobs(ctx, DType::kF32, {rows}),
          kept(ctx, DType::kU8, {rows, CompactLayout::row_bytes(kWidth)}),
          act(ctx, rows, kWidth),
          dgate_up(ctx, rows, 2 * kWidth) {}
    Large gate_up, dact, probs, dprobs, kept;
    Codes act, dgate_up;
  };
  const auto run = [&](const Operands& of, const TensorView& bounds) {
    scaled_swiglu_codes_forward(ctx(), {.gate_up_R2F = of.gate_up.view(),
                                        .probs_R = of.probs.view(),
                                        .offsets_E1 = bounds,
                                        .act_codes_RF = of.act.row_codes.view(),
                                        .act_row_scales_BR = of.act.row_scales.view(),
                                        .kept_RC = of.kept.view(),
                                        .rule = kRule,
                                        .interleave = kInterleave});
    scaled_swiglu_codes_backward(ctx(), {.dact_RF = of.dact.view(),
                                         .kept_RC = of.kept.view(),
                                         .probs_R = of.probs.view(),
                                         .offsets_E1 = bounds,
                                         .dgate_up_codes_R2F = of.dgate_up.row_codes.view(),
                                         .dgate_up_row_scales_BR = of.dgate_up.row_scales.view(),
                                         .dgate_up_column_codes_2FR = of.dgate_up.column_codes.view(),
                                         .dgate_up_column_scales_B2F = of.dgate_up.column_scales.view(),
                                         .act_column_codes_FR = of.act.column_codes.view(),
                                         .act_column_scales_BF = of.act.column_scales.view(),
                                         .dprobs_R = of.dprobs.view(),
                                         .rule = kRule,
                                         .interleave = kInterleave});
  };
  const Operands large(ctx(), kCodeRows);
  const Table wide(ctx(), 1, 2 * kWidth), narrow(ctx(), 2, kWidth);
  Filler first(ctx(), 3, kCodeRows), second(ctx(), 4, kCodeRows);
  first.fill(wide, large.gate_up.view());
  second.fill(narrow, large.dact.view());
  GpuTensor probs(ctx(), DType::kF32, Shape{kCodeRows});
  probs.set(normals(5, kCodeRows, DType::kF32, 0.5));
  copy(large.probs.view(), probs.view());
  const GpuTensor all = offsets(kUsed), one = offsets(kBand);
  // The bands alone come first: the operation overwrites dact.
  std::vector<std::unique_ptr<Operands>> alone;
  for (const int64_t b : kBands) {
    alone.push_back(std::make_unique<Operands>(ctx(), kBand));
    copy(alone.back()->gate_up.view(), large.gate_up.view().rows(b * kBand, kBand));
    copy(alone.back()->dact.view(), large.dact.view().rows(b * kBand, kBand));
    copy(alone.back()->probs.view(), large.probs.view().rows(b * kBand, kBand));
    run(*alone.back(), one.view());
  }
  run(large, all.view());
  for (size_t i = 0; i < kBands.size(); ++i) {
    expect_rows(large.act, alone[i]->act, kBands[i]);
    expect_columns(large.act, alone[i]->act, kBands[i]);
    expect_rows(large.dgate_up, alone[i]->dgate_up, kBands[i]);
    expect_columns(large.dgate_up, alone[i]->dgate_up, kBands[i]);
    EXPECT_EQ(large.dprobs.elements(kBands[i] * kBand, kBand), alone[i]->dprobs.elements(0, kBand))
        << "dprobs of rows from " << kBands[i] * kBand;
  }
}

}  // namespace
}  // namespace biomoe::test
