#include "biomoe/ops/rms_norm.h"
#include "tests/cuda/gpu_test.h"
#include "tests/ref/rms_norm.h"

namespace biomoe::test {
namespace {

struct Sizes {
  int64_t tokens, width, padding;
  double eps = 1e-5;
};

// Rows of one vector, of one block's vectors and one more, of odd widths and strides, and too wide for
// registers; rows around the number of partial sums.
const std::vector<Sizes> kSizes = {{0, 8, 0},    {1, 1, 0, 0.5}, {3, 7, 1},    {5, 8, 0},     {5, 8, 8},
                                   {2, 4088, 0}, {2, 4096, 8},   {2, 4104, 0}, {2, 16392, 0}, {2, 32776, 0},
                                   {3, 257, 3},  {527, 16, 0},   {528, 24, 0}, {529, 40, 0},  {1061, 33, 0}};

using CudaRmsNormTest = GpuTest;

TEST_F(CudaRmsNormTest, ForwardMatchesReference) {
  for (const DType dtype : kComputeTypes) {
    for (const auto& [tokens, width, padding, eps] : kSizes) {
      SCOPED_TRACE(fmt::format("{} {} x {}", dtype_name(dtype), tokens, width));
      const Shape shape{tokens, width};
      GpuTensor x(ctx(), dtype, shape, padding), residual(ctx(), dtype, shape),
          weight(ctx(), dtype, Shape{width});
      GpuTensor sum(ctx(), dtype, shape, padding), y(ctx(), dtype, shape, padding),
          rstd(ctx(), DType::kF32, Shape{tokens});
      x.set(normals(1, x.size(), dtype, 2.0));
      residual.set(normals(2, x.size(), dtype));
      weight.set(normals(3, width, dtype));
      RmsNormForwardArgs args{.x_TD = x.view(),
                              .residual_TD = {},
                              .weight_D = weight.view(),
                              .sum_TD = {},
                              .y_TD = y.view(),
                              .rstd_T = rstd.view(),
                              .eps = eps};
      rms_norm_forward(ctx(), args);
      const auto plain = ref::rms_norm(x.values(), weight.values(), eps);
      EXPECT_CLOSE(y.values(), plain.y, dtype);
      EXPECT_CLOSE(rstd.values(), plain.rstd, DType::kF32);
      args.residual_TD = residual.view();
      args.sum_TD = sum.view();
      rms_norm_forward(ctx(), args);
      EXPECT_CLOSE(sum.values(), sum_of(x.values(), residual.values()), dtype);
      const auto added = ref::rms_norm(sum.values(), weight.values(), eps);
      EXPECT_CLOSE(y.values(), added.y, dtype);
      EXPECT_CLOSE(rstd.values(), added.rstd, DType::kF32);
      EXPECT_TRUE(y.padding_untouched() && sum.padding_untouched() && rstd.padding_untouched());
      const auto first = y.bytes();
      const auto sums = sum.values();
      args.sum_TD = residual.view();  // in place
      rms_norm_forward(ctx(), args);
      EXPECT_EQ(residual.values(), sums);
      EXPECT_EQ(y.bytes(), first);
    }
  }
}

TEST_F(CudaRmsNormTest, BackwardMatchesReferenceAndRepeats) {
  for (const DType dtype : kComputeTypes) {
    for (const auto& [tokens, width, padding, eps] : kSizes) {
      if (tokens * width > 40000) continue;  // the reference takes width squared
      SCOPED_TRACE(fmt::format("{} {} x {}", dtype_name(dtype), tokens, width));
      const Shape shape{tokens, width};
      GpuTensor dy(ctx(), dtype, shape), sum(ctx(), dtype, shape, padding),
          weight(ctx(), dtype, Shape{width});
      GpuTensor rstd(ctx(), DType::kF32, Shape{tokens}), dresidual(ctx(), dtype, shape);
      dy.set(normals(1, dy.size(), dtype));
      sum.set(normals(2, dy.size(), dtype));
      weight.set(normals(3, width, dtype));
      dresidual.set(normals(4, dy.size(), dtype));
      rstd.set(ref::rms_norm(sum.values(), weight.values(), eps).rstd);
      const auto want = ref::rms_norm_backward(dy.values(), sum.values(), weight.values(), eps);
      for (const DType gradient : kComputeTypes) {
        GpuTensor dx(ctx(), dtype, shape, padding), dweight(ctx(), gradient, Shape{width}),
            again(ctx(), gradient, Shape{width});
        RmsNormBackwardArgs args{.dy_TD = dy.view(),
                                 .sum_TD = sum.view(),
                                 .weight_D = weight.view(),
                                 .rstd_T = rstd.view(),
                                 .dresidual_TD = {},
                                 .dx_TD = dx.view(),
                                 .dweight_D = dweight.view()};
        Context& scratch = with_scratch(rms_norm_backward_scratch_bytes(Device::kCuda, tokens, width));
        rms_norm_backward(scratch, args);
        EXPECT_CLOSE(dx.values(), want.dsum, dtype);
        EXPECT_CLOSE(dweight.values(), want.dweight, gradient);
        EXPECT_TRUE(dx.padding_untouched() && dweight.padding_untouched());
        args.dweight_D = again.view();
        args.dresidual_TD = dresidual.view();
        rms_norm_backward(scratch, args);
        EXPECT_EQ(again.bytes(), dweight.bytes());
        EXPECT_CLOSE(dx.values(), sum_of(want.dsum, dresidual.values()), dtype);
        args.accumulate = true;
        rms_norm_backward(scratch, args);
        EXPECT_CLOSE(again.values(), sum_of(want.dweight, want.dweight), gradient);
        EXPECT_EQ(scratch.scratch->used(), 0u);
      }
    }
  }
}

TEST_F(CudaRmsNormTest, NanStaysInItsRow) {
  GpuTensor x(ctx(), DType::kF32, Shape{3, 9}), weight(ctx(), DType::kF32, Shape{9}),
      y(ctx(), DType::kF32, Shape{3, 9});
  GpuTensor rstd(ctx(), DType::kF32, Shape{3});
  std::vector<double> values(27, 0.0);
  values[13] = std::nan("");
  x.set(values);
  weight.fill(1);
  rms_norm_forward(ctx(), {.x_TD = x.view(),
                           .residual_TD = {},
                           .weight_D = weight.view(),
                           .sum_TD = {},
                           .y_TD = y.view(),
                           .rstd_T = rstd.view()});
  const auto got = y.values();
  for (size_t i = 0; i < 27; ++i) EXPECT_TRUE(i / 9 == 1 ? std::isnan(got[i]) : got[i] == 0.0) << i;
}

}  // namespace
}  // namespace biomoe::test
