// RoPE and the activation.
#include "biomoe/ops/rope.h"
#include "biomoe/ops/scaled_swiglu.h"
#include "tests/cuda/gpu_test.h"
#include "tests/ref/rope.h"
#include "tests/ref/scaled_swiglu.h"

namespace biomoe::test {
namespace {

using CudaElementwiseTest = GpuTest;

TEST_F(CudaElementwiseTest, RopeMatchesReferenceAndItsInverseUndoesIt) {
  struct Sizes {
    int64_t tokens, width, heads, head_dim, padding;
  };
  constexpr int64_t kPositions = 50;
  for (const DType dtype : kComputeTypes) {
    for (const auto& [tokens, width, heads, head_dim, padding] :
         {Sizes{0, 16, 1, 16, 0}, Sizes{1, 2, 1, 2, 0}, Sizes{7, 100, 3, 6, 3}, Sizes{33, 64, 2, 16, 0},
          Sizes{9, 5200, 40, 128, 8}, Sizes{5, 64, 0, 16, 0}}) {
      SCOPED_TRACE(fmt::format("{} {} x {}", dtype_name(dtype), tokens, width));
      GpuTensor x(ctx(), dtype, Shape{tokens, width}, padding), position(ctx(), DType::kI32, Shape{tokens});
      Tensor<float> cosines(Shape{kPositions, head_dim / 2}), sines(Shape{kPositions, head_dim / 2});
      fill_rope_tables(10000, head_dim, cosines.view(), sines.view());
      GpuTensor cosine(ctx(), DType::kF32, cosines.shape()), sine(ctx(), DType::kF32, cosines.shape());
      cosine.set(cosines.values());
      sine.set(sines.values());
      const auto positions = ids(1, tokens, kPositions);
      position.set(doubles(positions));
      x.set(normals(2, x.size(), dtype));
      const auto before = x.values();
      RopeArgs args{.x_TC = x.view(),
                    .positions_T = position.view(),
                    .cos_SK2 = cosine.view(),
                    .sin_SK2 = sine.view(),
                    .num_heads = heads,
                    .head_dim = head_dim};
      rope(ctx(), args);
      EXPECT_CLOSE(x.values(), ref::rope(before, positions, 10000, {tokens, width, heads, head_dim}), dtype);
      args.inverse = true;
      rope(ctx(), args);
      EXPECT_CLOSE(x.values(), before, dtype);
      EXPECT_TRUE(x.padding_untouched());
    }
  }
}

// From halves to alternating blocks of `interleave` columns.
std::vector<double> interleaved(const std::vector<double>& halves, int64_t width, int64_t interleave) {
  if (interleave == 0) return halves;
  std::vector<double> out(halves.size());
  for (size_t at = 0; at < halves.size(); ++at) {
    const auto row = static_cast<int64_t>(at) / (2 * width), column = static_cast<int64_t>(at) % (2 * width);
    const int64_t f = column % width;
    const int64_t to = 2 * interleave * (f / interleave) + f % interleave + (column < width ? 0 : interleave);
    out[static_cast<size_t>(row * 2 * width + to)] = halves[at];
  }
  return out;
}

TEST_F(CudaElementwiseTest, SwigluMatchesReferenceAndLeavesUnusedRowsAlone) {
  struct Sizes {
    int64_t rows, used, width, interleave, padding;
  };
  for (const DType dtype : kComputeTypes) {
    for (const auto& [rows, used, width, interleave, padding] :
         {Sizes{0, 0, 8, 0, 0}, Sizes{1, 1, 1, 0, 0}, Sizes{7, 7, 15, 5, 1}, Sizes{12, 9, 16, 8, 8},
          Sizes{5, 5, 64, 32, 0}, Sizes{9, 0, 24, 4, 0}, Sizes{6, 5, 2056, 0, 0},
          Sizes{3, 3, 14336, 32, 0}}) {
      SCOPED_TRACE(fmt::format("{} {} x {} by {}", dtype_name(dtype), rows, width, interleave));
      GpuTensor gate_up(ctx(), dtype, Shape{rows, 2 * width}, padding),
          probs(ctx(), DType::kF32, Shape{rows});
      GpuTensor act(ctx(), dtype, Shape{rows, width}, padding), dact(ctx(), dtype, Shape{rows, width});
      GpuTensor dgate_up(ctx(), dtype, Shape{rows, 2 * width}), dprobs(ctx(), DType::kF32, Shape{rows});
      GpuTensor offsets(ctx(), DType::kI64, Shape{3});
      const auto halves = normals(1, gate_up.size(), dtype, 2.0);
      gate_up.set(interleaved(halves, width, interleave));
      probs.set(normals(2, rows, DType::kF32));
      dact.set(normals(3, dact.size(), dtype));
      offsets.set({0, static_cast<double>(used / 2), static_cast<double>(used)});
      const auto columns = static_cast<size_t>(width);
      auto want = ref::scaled_swiglu(halves, probs.values(), columns);
      auto gradients = ref::scaled_swiglu_backward(dact.values(), halves, probs.values(), columns);
      auto dgate_up_want = interleaved(gradients.dgate_up, width, interleave);
      const auto unused = [&](std::vector<double>& values, int64_t row) {
        std::fill(values.begin() + used * row, values.end(), std::nan(""));
      };
      unused(want, width);
      unused(dgate_up_want, 2 * width);
      unused(gradients.dprobs, 1);
      scaled_swiglu_forward(ctx(), {.gate_up_R2F = gate_up.view(),
                                    .probs_R = probs.view(),
                                    .act_RF = act.view(),
                                    .offsets_E1 = offsets.view(),
                                    .interleave = interleave});
      EXPECT_CLOSE(act.values(), want, dtype);
      EXPECT_TRUE(act.padding_untouched());
      ScaledSwigluBackwardArgs args{.dact_RF = dact.view(),
                                    .gate_up_R2F = gate_up.view(),
                                    .probs_R = probs.view(),
                                    .dgate_up_R2F = dgate_up.view(),
                                    .dprobs_R = dprobs.view(),
                                    .offsets_E1 = offsets.view(),
                                    .interleave = interleave};
      scaled_swiglu_backward(ctx(), args);
      EXPECT_CLOSE(dgate_up.values(), dgate_up_want, dtype);
      EXPECT_CLOSE(dprobs.values(), gradients.dprobs, DType::kF32);
      EXPECT_TRUE(dgate_up.padding_untouched() && dprobs.padding_untouched());
      args.dgate_up_R2F = gate_up.view();
      args.offsets_E1 = {};
      scaled_swiglu_backward(ctx(), args);
      EXPECT_CLOSE(
          gate_up.values(),
          interleaved(ref::scaled_swiglu_backward(dact.values(), halves, probs.values(), columns).dgate_up,
                      width, interleave),
          dtype);
    }
  }
}

}  // namespace
}  // namespace biomoe::test
