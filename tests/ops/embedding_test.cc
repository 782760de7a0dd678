#include "biomoe/ops/embedding.h"

#include "tests/ops/op_test.h"
#include "tests/ref/embedding.h"

namespace biomoe::test {
namespace {

struct Sizes {
  int64_t tokens, vocabulary, width;
};

class EmbeddingTest : public testing::TestWithParam<Sizes> {};

TEST_P(EmbeddingTest, MatchesReferenceForAnyNumberOfThreads) {
  const auto [tokens_count, vocabulary, width] = GetParam();
  Tensor<int32_t> tokens(Shape{tokens_count});
  Tensor<float> weight(Shape{vocabulary, width}), dy(Shape{tokens_count, width}, 5);
  tokens.fill_ids(1, vocabulary);
  weight.fill_normal(2);
  dy.fill_normal(3);
  Tensor<float> start(Shape{vocabulary, width});
  start.fill_normal(4);
  const auto added = ref::embedding_backward(tokens.elements(), dy.values(), vocabulary, width);
  const auto want = sum_of(start.values(), added);
  Tensor<float> first(Shape{vocabulary, width});
  for (int threads : {1, 2, 3}) {
    TestContext ctx(threads);
    Tensor<float> y(Shape{tokens_count, width}, 3), dweight = start;
    embedding_forward(*ctx, {.tokens_T = tokens.view(), .weight_VD = weight.view(), .y_TD = y.view()});
    EXPECT_EQ(y.values(), ref::embedding(tokens.elements(), weight.values(), width));
    EXPECT_TRUE(y.padding_untouched());
    EmbeddingBackwardArgs args{
        .tokens_T = tokens.view(), .dy_TD = dy.view(), .dweight_VD = dweight.view(), .accumulate = true};
    embedding_backward(*ctx, args);
    EXPECT_CLOSE(dweight.values(), want, DType::kF32);
    EXPECT_TRUE(dweight.padding_untouched());
    if (threads == 1) first = dweight;
    EXPECT_TRUE(dweight.same_bits(first)) << threads << " threads";
    args.accumulate = false;
    dweight.fill(std::nanf(""));
    embedding_backward(*ctx, args);
    EXPECT_CLOSE(dweight.values(), added, DType::kF32);
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, EmbeddingTest,
                         testing::Values(Sizes{0, 4, 8}, Sizes{1, 1, 1}, Sizes{7, 3, 31}, Sizes{300, 16, 32},
                                         Sizes{513, 5, 33}, Sizes{700, 40, 129}, Sizes{64, 512, 256}));

TEST(EmbeddingTest, RefusesTokensOutsideTheVocabularyAndWrongShapes) {
  TestContext ctx(1);
  Tensor<int32_t> tokens(Shape{3});
  Tensor<float> weight(Shape{4, 2}), rows(Shape{3, 2}), narrow(Shape{3, 1});
  weight.fill(0);
  rows.fill(0);
  for (int32_t bad : {-1, 4}) {
    tokens.fill(0).at(1) = bad;
    EXPECT_THROW(
        embedding_forward(*ctx, {.tokens_T = tokens.view(), .weight_VD = weight.view(), .y_TD = rows.view()}),
        Error);
    EXPECT_THROW(embedding_backward(
                     *ctx, {.tokens_T = tokens.view(), .dy_TD = rows.view(), .dweight_VD = weight.view()}),
                 Error);
  }
  tokens.fill(0);
  EXPECT_THROW(
      embedding_forward(*ctx, {.tokens_T = tokens.view(), .weight_VD = weight.view(), .y_TD = narrow.view()}),
      Error);
  EXPECT_THROW(
      embedding_forward(*ctx, {.tokens_T = tokens.view(), .weight_VD = weight.view(), .y_TD = TensorView()}),
      Error);
}

TEST(EmbeddingReferenceTest, GradientIsThatOfFiniteDifferences) {
  const std::vector<int32_t> tokens = {2, 0, 2, 1, 2};
  Tensor<double> weight(Shape{4, 3}), dy(Shape{5, 3});
  weight.fill_normal(1);
  dy.fill_normal(2);
  const auto loss = [&](const ref::Vector& w) { return ref::dot(ref::embedding(tokens, w, 3), dy.values()); };
  EXPECT_LE(ref::gradient_error(loss, weight.values(), ref::embedding_backward(tokens, dy.values(), 4, 3)),
            ref::kGradientTolerance);
}

}  // namespace
}  // namespace biomoe::test
