// The public layers on the GPU against plain computations in double, for any split sizes.
#include <numeric>

#include "biomoe/moe/split_sequential.h"
#include "tests/cuda/gpu_test.h"
#include "tests/ref/grouped_gemm.h"
#include "tests/ref/scaled_swiglu.h"

namespace biomoe::test {
namespace {

constexpr int64_t kIn = 64, kWidth = 96, kOut = 40, kExperts = 5, kInterleave = 32;

using CudaSequentialTest = GpuTest;

// Columns of halves in the order of an interleaved matrix of `rows` x 2 kWidth, or its rows when it is a
// weight.
std::vector<double> interleaved(const std::vector<double>& halves, int64_t outer, int64_t inner) {
  std::vector<double> out(halves.size());
  for (int64_t o = 0; o < outer; ++o) {
    for (int64_t i = 0; i < 2 * kWidth; ++i) {
      const int64_t f = i / (2 * kInterleave) * kInterleave + i % kInterleave;
      const int64_t from = i % (2 * kInterleave) < kInterleave ? f : kWidth + f;
      for (int64_t j = 0; j < inner; ++j) {
        out[static_cast<size_t>((o * 2 * kWidth + i) * inner + j)] =
            halves[static_cast<size_t>((o * 2 * kWidth + from) * inner + j)];
      }
    }
  }
  return out;
}

TEST_F(CudaSequentialTest, MatchesTheReferenceForAnySplits) {
  const std::vector<std::vector<int64_t>> split_cases{{0, 1, 31, 33, 97}, {162, 0, 0, 0, 0},
                                                      {0, 0, 0, 0, 97},   {1, 1, 1, 1, 1},
                                                      {0, 0, 0, 0, 0},    {128, 129, 32, 0, 2}};
  for (const auto& splits : split_cases) {
    const int64_t rows = std::accumulate(splits.begin(), splits.end(), int64_t{0});
    ref::ExpertSizes first{kIn, 2 * kWidth, {0}}, last{kWidth, kOut, {0}};
    for (const int64_t split : splits) {
      first.offsets.push_back(first.offsets.back() + split);
      last.offsets.push_back(last.offsets.back() + split);
    }
    const DType type = DType::kBF16;
    const auto up = normals(1, kExperts * 2 * kWidth * kIn, type, 0.1);
    const auto down = normals(2, kExperts * kOut * kWidth, type, 0.1);
    const auto x = normals(3, rows * kIn, type), dy = normals(5, rows * kOut, type);
    const auto scales = normals(4, rows, DType::kF32, 0.3);
    const auto hidden = ref::grouped_forward(first, x, up);
    const auto act = ref::scaled_swiglu(hidden, scales, kWidth);
    const auto y = ref::grouped_forward(last, act, down);
    const auto inner =
        ref::scaled_swiglu_backward(ref::grouped_dgrad(last, dy, down), hidden, scales, kWidth);
    const auto dx = ref::grouped_dgrad(first, inner.dgate_up, up);
    const auto dup = ref::grouped_wgrad(first, inner.dgate_up, x, ref::Vector(up.size(), 0.0));
    const auto ddown = ref::grouped_wgrad(last, dy, act, ref::Vector(down.size(), 0.0));
    for (const auto& [fusion, product] : {std::pair{Fusion::kRequired, GroupedProduct::kGrouped},
                                          std::pair{Fusion::kOff, GroupedProduct::kGrouped},
                                          std::pair{Fusion::kOff, GroupedProduct::kLoop}}) {
      GpuTensor gpu_up(ctx(), type, Shape{kExperts, 2 * kWidth, kIn}),
          gpu_down(ctx(), type, Shape{kExperts, kOut, kWidth});
      GpuTensor gpu_dup(ctx(), type, Shape{kExperts, 2 * kWidth, kIn}),
          gpu_ddown(ctx(), type, Shape{kExperts, kOut, kWidth});
      GpuTensor gpu_x(ctx(), type, Shape{rows, kIn}), gpu_dy(ctx(), type, Shape{rows, kOut}),
          gpu_y(ctx(), type, Shape{rows, kOut});
      GpuTensor gpu_dx(ctx(), type, Shape{rows, kIn}), gpu_scales(ctx(), DType::kF32, Shape{rows}),
          gpu_dscales(ctx(), DType::kF32, Shape{rows});
      gpu_up.set(interleaved(up, kExperts, kIn));
      gpu_down.set(down);
      gpu_x.set(x);
      gpu_dy.set(dy);
      gpu_scales.set(scales);
      const Sequential layers(
          Device::kCuda, type,
          {GroupedLinear{.w_EOI = gpu_up.view(), .dw_EOI = gpu_dup.view(), .product = product},
           ScaledSwiGLU{.interleave = kInterleave},
           GroupedLinear{.w_EOI = gpu_down.view(), .dw_EOI = gpu_ddown.view(), .product = product}},
          fusion);
      SCOPED_TRACE(layers.describe());
      SplitSequential session(ctx(), type, layers, rows + 3);
      session.forward(gpu_x.view(), splits, gpu_scales.view(), gpu_y.view());
      SplitSequential::Gradients gradients;
      gradients.x_NI = gpu_x.view();
      gradients.scales_N = gpu_scales.view();
      gradients.dy_NO = gpu_dy.view();
      gradients.dx_NI = gpu_dx.view();
      gradients.dscales_N = gpu_dscales.view();
      session.backward(gradients);
      EXPECT_CLOSE(gpu_y.values(), y, type);
      EXPECT_CLOSE(gpu_dx.values(), dx, type);
      EXPECT_CLOSE(gpu_dscales.values(), inner.dprobs, type);
      EXPECT_CLOSE(gpu_dup.values(), interleaved(dup, kExperts, kIn), type);
      EXPECT_CLOSE(gpu_ddown.values(), ddown, type);
    }
  }
}

TEST_F(CudaSequentialTest, SaysWhyTheGpuCannotFuse) {
  GpuTensor up(ctx(), DType::kBF16, Shape{kExperts, 2 * kWidth, kIn}),
      down(ctx(), DType::kBF16, Shape{kExperts, kOut, kWidth});
  const GroupedLinear first{.w_EOI = up.view()}, last{.w_EOI = down.view()};
  const Sequential halves(Device::kCuda, DType::kBF16, {first, ScaledSwiGLU{}, last});
  EXPECT_FALSE(halves.fused_at(0));
  EXPECT_NE(halves.describe().find("interleaved by 0"), std::string::npos) << halves.describe();
  EXPECT_THROW(Sequential(Device::kCuda, DType::kBF16, {first, ScaledSwiGLU{}, last}, Fusion::kRequired),
               Error);
  EXPECT_THROW(Sequential(Device::kCuda, DType::kF32, {first, ScaledSwiGLU{.interleave = 32}, last},
                          Fusion::kRequired),
               Error);
}

}  // namespace
}  // namespace biomoe::test
