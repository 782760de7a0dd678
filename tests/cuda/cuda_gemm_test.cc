#include "biomoe/ops/gemm.h"
#include "tests/cuda/gpu_test.h"
#include "tests/ref/gemm.h"

namespace biomoe::test {
namespace {

struct Types {
  DType input;
  DType output;
};
constexpr Types kTypes[] = {
    {DType::kF32, DType::kF32}, {DType::kBF16, DType::kBF16}, {DType::kBF16, DType::kF32}};

// Rows and addresses aligned for the widest loads, or for single elements only.
struct Placement {
  int64_t padding_a, padding_b, padding_c, offset;
};
constexpr Placement kPlacements[] = {{0, 0, 0, 0}, {3, 5, 2, 1}, {64, 8, 128, 0}};

Shape operand(int64_t rows, int64_t columns, bool transpose) {
  return transpose ? Shape{columns, rows} : Shape{rows, columns};
}

class CudaGemmTest : public testing::TestWithParam<ref::GemmSizes> {};

void check_case(Context& ctx, const ref::GemmSizes& sizes, const Types& types, const Placement& place,
                bool transpose_a, bool transpose_b) {
  const auto [rows, columns, inner] = sizes;
  const double scale = 1.0 / std::sqrt(static_cast<double>(std::max<int64_t>(1, inner)));
  const auto a_values = normals(1, rows * inner, types.input);
  const auto b_values = normals(2, inner * columns, types.input, scale);
  auto start = normals(3, rows * columns, types.output);
  if (!start.empty()) start[start.size() / 2] = std::nan("");
  GpuTensor a(ctx, types.input, operand(rows, inner, transpose_a), place.padding_a, place.offset);
  GpuTensor b(ctx, types.input, operand(inner, columns, transpose_b), place.padding_b, place.offset);
  GpuTensor c(ctx, types.output, Shape{rows, columns}, place.padding_c, place.offset);
  a.set(a_values);
  b.set(b_values);
  const auto want = ref::gemm(sizes, a_values, transpose_a, b_values, transpose_b);
  GemmArgs args{
      .a = a.view(), .b = b.view(), .c = c.view(), .transpose_a = transpose_a, .transpose_b = transpose_b};
  gemm(ctx, args);  // over NaN
  EXPECT_LE(unit_error(c.values(), want), product_tolerance(types.input, types.output, inner));
  EXPECT_TRUE(c.padding_untouched());
  c.set(start);
  args.accumulate = true;
  gemm(ctx, args);
  EXPECT_LE(unit_error(c.values(), sum_of(want, start)), product_tolerance(types.input, types.output, inner));
  EXPECT_TRUE(c.padding_untouched());
}

TEST_P(CudaGemmTest, MatchesReferenceInEveryTypePlacementAndTransposition) {
  BIOMOE_REQUIRE_GPU();
  GpuContext gpu;
  for (const Types& types : kTypes) {
    for (const Placement& place : kPlacements) {
      for (bool transpose_a : {false, true}) {
        for (bool transpose_b : {false, true}) {
          SCOPED_TRACE(testing::Message()
                       << dtype_name(types.input) << " to " << dtype_name(types.output) << ", offset "
                       << place.offset << ", transposed " << transpose_a << transpose_b);
          check_case(*gpu, GetParam(), types, place, transpose_a, transpose_b);
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, CudaGemmTest,
                         testing::Values(ref::GemmSizes{0, 5, 7}, ref::GemmSizes{5, 0, 7},
                                         ref::GemmSizes{5, 7, 0}, ref::GemmSizes{0, 0, 0},
                                         ref::GemmSizes{1, 1, 1}, ref::GemmSizes{3, 1, 17},
                                         ref::GemmSizes{1, 65, 33}, ref::GemmSizes{63, 64, 65},
                                         ref::GemmSizes{127, 129, 128}, ref::GemmSizes{128, 256, 64},
                                         ref::GemmSizes{257, 130, 300}, ref::GemmSizes{8, 256, 1000}));

TEST(CudaGemmTest, ReplaysWhatItRanAndRunsItAgainBitwise) {
  BIOMOE_REQUIRE_GPU();
  GpuContext gpu;
  Context& ctx = *gpu;
  GpuTensor a(ctx, DType::kBF16, Shape{192, 512}), b(ctx, DType::kBF16, Shape{320, 512});
  GpuTensor c(ctx, DType::kBF16, Shape{192, 320});
  a.set(normals(1, 192 * 512, DType::kBF16));
  b.set(normals(2, 320 * 512, DType::kBF16));
  const GemmArgs args{.a = a.view(), .b = b.view(), .c = c.view(), .transpose_b = true};
  gemm(ctx, args);
  const auto want = c.bytes();
  RecordedStep::begin(ctx);
  gemm(ctx, args);
  const RecordedStep step = RecordedStep::end(ctx);
  for (int run = 0; run < 3; ++run) {
    c.poison();
    step.replay(ctx);
    EXPECT_EQ(c.bytes(), want);
  }
}

}  // namespace
}  // namespace biomoe::test
