#include "biomoe/ops/embedding.h"
#include "tests/cuda/gpu_test.h"
#include "tests/ref/embedding.h"

namespace biomoe::test {
namespace {

struct Sizes {
  int64_t tokens, vocabulary, width, padding;
};

// One id, few ids, more ids than one digit of the sort holds; runs shorter and longer than a piece.
const std::vector<Sizes> kSizes = {
    {0, 5, 8, 0},     {1, 1, 1, 0},      {31, 3, 8, 8},    {32, 1, 16, 0},     {33, 2, 7, 1},
    {257, 16, 8, 0},  {5000, 16, 24, 0}, {3000, 1, 8, 0},  {1000, 1025, 8, 0}, {2000, 40000, 8, 0},
    {17000, 5, 1, 0}, {300, 7, 1032, 0}, {300, 7, 1025, 2}};

using CudaEmbeddingTest = GpuTest;

TEST_F(CudaEmbeddingTest, ForwardCopiesRowsAndShowsIdsOutside) {
  for (const DType dtype : kComputeTypes) {
    for (const auto& [tokens, vocabulary, width, padding] : kSizes) {
      const auto token_ids = ids(1, tokens, vocabulary);
      GpuTensor id(ctx(), DType::kI32, Shape{tokens}), weight(ctx(), dtype, Shape{vocabulary, width});
      GpuTensor y(ctx(), dtype, Shape{tokens, width}, padding);
      id.set(doubles(token_ids));
      weight.set(normals(2, weight.size(), dtype));
      embedding_forward(ctx(), {.tokens_T = id.view(), .weight_VD = weight.view(), .y_TD = y.view()});
      EXPECT_EQ(y.values(), ref::embedding(token_ids, weight.values(), width));
      EXPECT_TRUE(y.padding_untouched());
      for (const double outside : {-1.0, static_cast<double>(vocabulary)}) {
        id.fill(outside);
        embedding_forward(ctx(), {.tokens_T = id.view(), .weight_VD = weight.view(), .y_TD = y.view()});
        for (const double value : y.values()) ASSERT_TRUE(std::isnan(value));
      }
    }
  }
}

TEST_F(CudaEmbeddingTest, BackwardMatchesReferenceAndRepeats) {
  for (const DType dtype : kComputeTypes) {
    for (const DType gradient : kComputeTypes) {
      for (const auto& [tokens, vocabulary, width, padding] : kSizes) {
        SCOPED_TRACE(fmt::format("{} {} x {} of {}", dtype_name(dtype), tokens, width, vocabulary));
        const auto token_ids = ids(1, tokens, vocabulary);
        GpuTensor id(ctx(), DType::kI32, Shape{tokens}), dy(ctx(), dtype, Shape{tokens, width}, padding);
        GpuTensor dweight(ctx(), gradient, Shape{vocabulary, width}),
            again(ctx(), gradient, Shape{vocabulary, width});
        id.set(doubles(token_ids));
        dy.set(normals(2, dy.size(), dtype));
        const auto want = ref::embedding_backward(token_ids, dy.values(), vocabulary, width);
        EmbeddingBackwardArgs args{.tokens_T = id.view(), .dy_TD = dy.view(), .dweight_VD = dweight.view()};
        Context& scratch =
            with_scratch(embedding_backward_scratch_bytes(Device::kCuda, tokens, vocabulary, width));
        embedding_backward(scratch, args);
        EXPECT_CLOSE(dweight.values(), want, gradient);
        EXPECT_TRUE(dweight.padding_untouched());
        args.dweight_VD = again.view();
        embedding_backward(scratch, args);
        EXPECT_EQ(again.bytes(), dweight.bytes());
        args.accumulate = true;
        embedding_backward(scratch, args);
        EXPECT_CLOSE(again.values(), sum_of(want, want), gradient);
        EXPECT_EQ(scratch.scratch->used(), 0u);
      }
    }
  }
}

}  // namespace
}  // namespace biomoe::test
