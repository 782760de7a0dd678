#include "biomoe/ops/attention.h"

#include "tests/ops/op_test.h"
#include "tests/ref/attention.h"

namespace biomoe::test {
namespace {

struct Case {
  int64_t heads, kv_heads, width;
  std::vector<int64_t> lengths;
  std::optional<int64_t> window = {};
};

std::vector<int64_t> cu_seqlens_of(const std::vector<int64_t>& lengths) {
  std::vector<int64_t> cu_seqlens{0};
  for (int64_t length : lengths) cu_seqlens.push_back(cu_seqlens.back() + length);
  return cu_seqlens;
}

// Inputs of a case in one qkv matrix, and fresh outputs.
class Fixture {
 public:
  explicit Fixture(const Case& attention_case)
      : shape{attention_case.heads, attention_case.kv_heads, attention_case.width, 0, attention_case.window},
        cu_seqlens(cu_seqlens_of(attention_case.lengths)),
        tokens(cu_seqlens.back()),
        q_width(shape.num_heads * shape.head_dim),
        kv_width(shape.num_key_value_heads * shape.head_dim),
        qkv(Shape{tokens, q_width + 2 * kv_width}, 1),
        dout(Shape{tokens, q_width}, 2),
        cu_seqlens_B1(Shape{static_cast<int64_t>(cu_seqlens.size())}) {
    for (int64_t length : attention_case.lengths) shape.max_seqlen = std::max(shape.max_seqlen, length);
    qkv.fill_normal(1);
    dout.fill_normal(2);
    for (size_t b = 0; b < cu_seqlens.size(); ++b) {
      cu_seqlens_B1.at(static_cast<int64_t>(b)) = static_cast<int32_t>(cu_seqlens[b]);
    }
  }

  ref::Vector columns(const Tensor<float>& matrix, int64_t begin, int64_t count) const {
    ref::Vector values;
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t i = begin; i < begin + count; ++i) values.push_back(matrix.at(t, i));
    }
    return values;
  }
  ref::Vector q(const Tensor<float>& matrix) const { return columns(matrix, 0, q_width); }
  ref::Vector k(const Tensor<float>& matrix) const { return columns(matrix, q_width, kv_width); }
  ref::Vector v(const Tensor<float>& matrix) const { return columns(matrix, q_width + kv_width, kv_width); }

  ref::AttentionGradients gradients(const Tensor<float>& matrix) const {
    return {q(matrix), k(matrix), v(matrix)};
  }

  size_t scratch_bytes(int threads) const {
    return attention_scratch_bytes(Device::kCpu, shape, tokens, threads);
  }

  AttentionForwardArgs forward(Tensor<float>& out, Tensor<float>& lse) {
    const TensorView all = qkv.view();
    return {.shape = shape,
            .q_TC = all.columns(0, q_width),
            .k_TC = all.columns(q_width, kv_width),
            .v_TC = all.columns(q_width + kv_width, kv_width),
            .cu_seqlens_B1 = cu_seqlens_B1.view(),
            .out_TC = out.view(),
            .lse_HT = lse.view()};
  }
  AttentionBackwardArgs backward(Tensor<float>& out, Tensor<float>& lse, Tensor<float>& dqkv) {
    const AttentionForwardArgs inputs = forward(out, lse);
    const TensorView all = dqkv.view();
    return {.shape = shape,
            .q_TC = inputs.q_TC,
            .k_TC = inputs.k_TC,
            .v_TC = inputs.v_TC,
            .cu_seqlens_B1 = inputs.cu_seqlens_B1,
            .out_TC = inputs.out_TC,
            .lse_HT = inputs.lse_HT,
            .dout_TC = dout.view(),
            .dq_TC = all.columns(0, q_width),
            .dk_TC = all.columns(q_width, kv_width),
            .dv_TC = all.columns(q_width + kv_width, kv_width)};
  }

  AttentionShape shape;
  std::vector<int64_t> cu_seqlens;
  int64_t tokens, q_width, kv_width;
  Tensor<float> qkv, dout;
  Tensor<int32_t> cu_seqlens_B1;
};

ref::Vector joined(const ref::AttentionGradients& gradients) {
  ref::Vector all = gradients.dq;
  all.insert(all.end(), gradients.dk.begin(), gradients.dk.end());
  all.insert(all.end(), gradients.dv.begin(), gradients.dv.end());
  return all;
}

// What both passes compute, with `threads` threads and poisoned memory.
struct Result {
  Result(Fixture& fixture, int threads)
      : out(Shape{fixture.tokens, fixture.q_width}, 3),
        lse(Shape{fixture.shape.num_heads, fixture.tokens}),
        dqkv(Shape{fixture.tokens, fixture.q_width + 2 * fixture.kv_width}, 1) {
    TestContext ctx(threads, fixture.scratch_bytes(threads));
    attention_forward(*ctx, fixture.forward(out, lse));
    (*ctx).scratch->poison_free();
    attention_backward(*ctx, fixture.backward(out, lse, dqkv));
    EXPECT_EQ((*ctx).scratch->used(), 0u);
  }
  bool same_bits(const Result& other) const {
    return out.same_bits(other.out) && lse.same_bits(other.lse) && dqkv.same_bits(other.dqkv);
  }
  Tensor<float> out, lse, dqkv;
};

class AttentionTest : public testing::TestWithParam<Case> {};

TEST_P(AttentionTest, MatchesReferenceForAnyNumberOfThreads) {
  Fixture f(GetParam());
  const auto q = f.q(f.qkv), k = f.k(f.qkv), v = f.v(f.qkv);
  const auto want = ref::attention(f.shape, f.cu_seqlens, q, k, v);
  const auto gradients = ref::attention_backward(f.shape, f.cu_seqlens, q, k, v, f.dout.values());
  const Result one(f, 1);
  EXPECT_CLOSE(one.out.values(), want.out, DType::kF32);
  EXPECT_CLOSE(one.lse.values(), want.lse, DType::kF32);
  EXPECT_CLOSE(joined(f.gradients(one.dqkv)), joined(gradients), DType::kF32);
  // Where every query sees one key alone these are 0 but for rounding, and have no scale of their own.
  if (ref::dot(gradients.dq, gradients.dq) > 0.0) {
    EXPECT_CLOSE(f.q(one.dqkv), gradients.dq, DType::kF32);
    EXPECT_CLOSE(f.k(one.dqkv), gradients.dk, DType::kF32);
  }
  EXPECT_TRUE(one.out.padding_untouched() && one.dqkv.padding_untouched());
  for (int threads : {1, 2, 3}) EXPECT_TRUE(Result(f, threads).same_bits(one)) << threads << " threads";
}

TEST_P(AttentionTest, PackedIsBitwiseWhatEachSequenceIsAloneInForward) {
  Fixture f(GetParam());
  const Result packed(f, 2);
  for (size_t b = 0; b < GetParam().lengths.size(); ++b) {
    Case alone = GetParam();
    alone.lengths = {GetParam().lengths[b]};
    Fixture single(alone);
    const int64_t begin = f.cu_seqlens[b];
    for (int64_t t = 0; t < single.tokens; ++t) {
      for (int64_t i = 0; i < single.qkv.shape()[1]; ++i) single.qkv.at(t, i) = f.qkv.at(begin + t, i);
      for (int64_t i = 0; i < single.q_width; ++i) single.dout.at(t, i) = f.dout.at(begin + t, i);
    }
    const Result got(single, 1);
    ref::Vector in_packed, by_itself;
    for (int64_t t = 0; t < single.tokens; ++t) {
      for (int64_t i = 0; i < single.q_width; ++i) ASSERT_EQ(got.out.at(t, i), packed.out.at(begin + t, i));
      for (int64_t i = 0; i < single.qkv.shape()[1]; ++i) {
        in_packed.push_back(packed.dqkv.at(begin + t, i));
        by_itself.push_back(got.dqkv.at(t, i));
      }
    }
    EXPECT_CLOSE(in_packed, by_itself, DType::kF32);
  }
}

// The last `queries` tokens of sequence b against all of its keys, which lie in one packed matrix here.
Tensor<float> decode(Fixture& f, size_t b, int64_t queries, int threads) {
  const int64_t begin = f.cu_seqlens[b], keys = f.cu_seqlens[b + 1] - begin;
  const TensorView all = f.qkv.view();
  const TensorView seen = all.rows(begin, keys);
  Tensor<float> out(Shape{queries, f.q_width}, 3);
  TestContext ctx(threads, attention_scratch_bytes(Device::kCpu, f.shape, queries, threads));
  attention_decode(*ctx, {.shape = f.shape,
                          .q_TC = all.rows(begin + keys - queries, queries).columns(0, f.q_width),
                          .k_PC = seen.columns(f.q_width, f.kv_width),
                          .v_PC = seen.columns(f.q_width + f.kv_width, f.kv_width),
                          .out_TC = out.view()});
  EXPECT_EQ((*ctx).scratch->used(), 0u);
  EXPECT_TRUE(out.padding_untouched());
  return out;
}

TEST_P(AttentionTest, DecodeGivesTheLastRowsOfEachSequence) {
  Fixture f(GetParam());
  const auto want = ref::attention(f.shape, f.cu_seqlens, f.q(f.qkv), f.k(f.qkv), f.v(f.qkv)).out;
  for (size_t b = 0; b + 1 < f.cu_seqlens.size(); ++b) {
    const int64_t length = f.cu_seqlens[b + 1] - f.cu_seqlens[b];
    for (int64_t queries : {int64_t{0}, int64_t{1}, int64_t{2}, length / 2, length}) {
      if (queries > length) continue;
      const auto end = want.begin() + f.cu_seqlens[b + 1] * f.q_width;
      const Tensor<float> one = decode(f, b, queries, 1);
      EXPECT_CLOSE(one.values(), ref::Vector(end - queries * f.q_width, end), DType::kF32);
      for (int threads : {2, 3}) EXPECT_TRUE(decode(f, b, queries, threads).same_bits(one)) << threads;
    }
  }
}

TEST(AttentionTest, DecodeRefusesMoreQueriesThanKeysAndMoreKeysThanPlanned) {
  Fixture f(Case{4, 2, 8, {6}});
  EXPECT_NO_THROW(decode(f, 0, 6, 1));
  f.shape.max_seqlen = 5;
  EXPECT_THROW(decode(f, 0, 1, 1), Error);
  f.shape.max_seqlen = 6;
  const TensorView all = f.qkv.view();
  Tensor<float> out(Shape{6, f.q_width});
  TestContext ctx(1, f.scratch_bytes(1));
  AttentionDecodeArgs args{.shape = f.shape,
                           .q_TC = all.columns(0, f.q_width),
                           .k_PC = all.rows(0, 5).columns(f.q_width, f.kv_width),
                           .v_PC = all.rows(0, 5).columns(f.q_width + f.kv_width, f.kv_width),
                           .out_TC = out.view()};
  EXPECT_THROW(attention_decode(*ctx, args), Error);
  args.k_PC = all.columns(f.q_width, f.kv_width);
  EXPECT_THROW(attention_decode(*ctx, args), Error);  // five values for six keys
}

// Around a query block of 16, 32 or 64 tokens (by the size of the group) and a chunk of 512 keys.
INSTANTIATE_TEST_SUITE_P(
    Cases, AttentionTest,
    testing::Values(Case{1, 1, 1, {1}}, Case{2, 1, 4, {}}, Case{2, 2, 4, {0, 0}}, Case{4, 2, 8, {3, 0, 5, 0}},
                    Case{2, 2, 5, {63, 64, 65}}, Case{4, 2, 16, {127, 129}}, Case{8, 1, 7, {15, 16, 17, 40}},
                    Case{3, 1, 64, {130, 1}}, Case{16, 1, 4, {33}}, Case{4, 2, 8, {50, 90}, 1},
                    Case{4, 2, 8, {50, 90}, 2}, Case{4, 2, 8, {50, 90}, 64}, Case{4, 2, 8, {50, 90}, 1000},
                    Case{1, 1, 8, {511, 512, 513}}, Case{2, 1, 8, {1100}}, Case{2, 1, 8, {1100}, 600},
                    Case{2, 1, 8, {700}, 513}, Case{2, 1, 4, std::vector<int64_t>(70, 1)}));

// Scores of hundreds, made of small integers and powers of two so that fp32 holds them exactly.
TEST(AttentionTest, LargeScoresNeitherOverflowNorLoseDigits) {
  for (std::optional<int64_t> window : {std::optional<int64_t>(), std::optional<int64_t>(100)}) {
    Fixture f(Case{2, 1, 16, {1100, 30}, window});
    for (int64_t t = 0; t < f.tokens; ++t) {
      for (int64_t i = 0; i < f.q_width + f.kv_width; ++i) f.qkv.at(t, i) = std::round(6.0f * f.qkv.at(t, i));
    }
    const auto q = f.q(f.qkv), k = f.k(f.qkv), v = f.v(f.qkv);
    const auto want = ref::attention(f.shape, f.cu_seqlens, q, k, v);
    const auto gradients = ref::attention_backward(f.shape, f.cu_seqlens, q, k, v, f.dout.values());
    const Result got(f, 2);
    EXPECT_CLOSE(got.out.values(), want.out, DType::kF32);
    EXPECT_CLOSE(got.lse.values(), want.lse, DType::kF32);
    // Backward has exp(score - lse) with lse rounded to fp32, which is off by half a unit in its last place.
    const double largest = *std::max_element(want.lse.begin(), want.lse.end());
    ASSERT_GT(largest, 200.0);
    const double bound = tolerance(DType::kF32) + largest * 0x1p-23;
    EXPECT_LE(unit_error(joined(f.gradients(got.dqkv)), joined(gradients)), bound);
  }
}

TEST(AttentionTest, NanOfOneSequenceReachesNoOther) {
  const Case attention_case{2, 1, 8, {70, 80, 70}};
  Fixture clean(attention_case), faulty(attention_case);
  for (int64_t i = 0; i < faulty.qkv.shape()[1]; ++i) faulty.qkv.at(100, i) = std::nanf("");
  const Result want(clean, 2), got(faulty, 2);
  for (int64_t t = 0; t < clean.tokens; ++t) {
    if (t >= 70 && t < 150) continue;
    for (int64_t i = 0; i < clean.q_width; ++i) ASSERT_EQ(got.out.at(t, i), want.out.at(t, i)) << t;
    for (int64_t i = 0; i < clean.qkv.shape()[1]; ++i) ASSERT_EQ(got.dqkv.at(t, i), want.dqkv.at(t, i)) << t;
  }
  EXPECT_TRUE(std::isnan(got.out.at(100, 0)));
}

TEST(AttentionTest, AWindowOfOneCopiesTheValues) {
  Fixture f(Case{4, 2, 8, {40}, 1});
  const Result got(f, 1);
  for (int64_t t = 0; t < f.tokens; ++t) {
    for (int64_t i = 0; i < f.q_width; ++i) {
      const int64_t of_value = i / 16 * 8 + i % 8;  // head i / 8 reads key/value head (i / 8) / 2
      ASSERT_EQ(got.out.at(t, i), f.qkv.at(t, f.q_width + f.kv_width + of_value));
    }
  }
}

TEST(AttentionTest, ScratchPlannedForABatchIsEnoughForEveryShorterOne) {
  AttentionShape shape{4, 2, 8, 100, {}};
  const size_t planned = attention_scratch_bytes(Device::kCpu, shape, 1000, 2);
  for (const std::vector<int64_t>& lengths :
       {std::vector<int64_t>(10, 100), {100, 100, 100}, {100}, {99, 100, 1}, std::vector<int64_t>(1000, 1)}) {
    Fixture f(Case{4, 2, 8, lengths});
    f.shape.max_seqlen = shape.max_seqlen;
    TestContext ctx(2, planned);
    Tensor<float> out(Shape{f.tokens, f.q_width}), lse(Shape{4, f.tokens}), dqkv(Shape{f.tokens, 64});
    EXPECT_NO_THROW(attention_forward(*ctx, f.forward(out, lse)));
    EXPECT_NO_THROW(attention_backward(*ctx, f.backward(out, lse, dqkv)));
  }
}

TEST(AttentionTest, RefusesShapesAndSequencesThatDoNotFit) {
  Fixture f(Case{4, 2, 8, {5, 6}});
  Tensor<float> out(Shape{11, 32}), lse(Shape{4, 11}), short_lse(Shape{4, 10});
  TestContext ctx(1, f.scratch_bytes(1));
  EXPECT_THROW(attention_forward(*ctx, f.forward(out, short_lse)), Error);
  const auto refused = [&](auto change) {
    AttentionForwardArgs args = f.forward(out, lse);
    change(args.shape);
    EXPECT_THROW(attention_forward(*ctx, args), Error);
  };
  refused([](AttentionShape& shape) { shape.num_key_value_heads = 3; });
  refused([](AttentionShape& shape) { shape.window = 0; });
  refused([](AttentionShape& shape) { shape.max_seqlen = 5; });
  f.cu_seqlens_B1.at(2) = 10;
  refused([](AttentionShape&) {});
}

TEST(AttentionReferenceTest, GradientIsThatOfFiniteDifferences) {
  for (std::optional<int64_t> window : {std::optional<int64_t>(), std::optional<int64_t>(2)}) {
    const AttentionShape shape{4, 2, 3, 4, window};
    const std::vector<int64_t> cu_seqlens{0, 4, 4, 7};
    Tensor<double> q(Shape{7, 12}), k(Shape{7, 6}), v(Shape{7, 6}), dout(Shape{7, 12});
    q.fill_normal(1);
    k.fill_normal(2);
    v.fill_normal(3);
    dout.fill_normal(4);
    const auto loss = [&](const ref::Vector& q_, const ref::Vector& k_, const ref::Vector& v_) {
      return ref::dot(ref::attention(shape, cu_seqlens, q_, k_, v_).out, dout.values());
    };
    const auto got =
        ref::attention_backward(shape, cu_seqlens, q.values(), k.values(), v.values(), dout.values());
    const auto of_q = [&](const ref::Vector& x) { return loss(x, k.values(), v.values()); };
    const auto of_k = [&](const ref::Vector& x) { return loss(q.values(), x, v.values()); };
    const auto of_v = [&](const ref::Vector& x) { return loss(q.values(), k.values(), x); };
    EXPECT_LE(ref::gradient_error(of_q, q.values(), got.dq), ref::kGradientTolerance);
    EXPECT_LE(ref::gradient_error(of_k, k.values(), got.dk), ref::kGradientTolerance);
    EXPECT_LE(ref::gradient_error(of_v, v.values(), got.dv), ref::kGradientTolerance);
  }
}

}  // namespace
}  // namespace biomoe::test
