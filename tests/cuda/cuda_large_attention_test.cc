// Attention and the loss over more than 2^31 elements: whole sequences, and rows, at the ends and around
// element 2^31. Skipped, with the reason, where the GPU has not the memory.
#include <numeric>

#include "biomoe/ops/attention.h"
#include "biomoe/ops/cross_entropy.h"
#include "tests/cuda/gpu_large.h"
#include "tests/ref/cross_entropy.h"

namespace biomoe::test {
namespace {

using CudaLargeAttentionTest = GpuTest;

constexpr int64_t kHeads = 32, kKeyValueHeads = 8, kHead = 128, kLength = 250;
constexpr int64_t kQueryWidth = kHeads * kHead, kKeyWidth = kKeyValueHeads * kHead;
constexpr int64_t kQkvWidth = kQueryWidth + 2 * kKeyWidth;
static_assert(kRows % kLength == 0 && kQueryWidth == kWidth);

// Bands of a qkv matrix, and what is beside it.
struct Views {
  TensorView qkv, cu_seqlens, out, lse, dout, dqkv;
  TensorView q(const TensorView& of) const { return of.columns(0, kQueryWidth); }
  TensorView k(const TensorView& of) const { return of.columns(kQueryWidth, kKeyWidth); }
  TensorView v(const TensorView& of) const { return of.columns(kQueryWidth + kKeyWidth, kKeyWidth); }
};

void forward_and_backward(Context& ctx, const AttentionShape& shape, const Views& of) {
  attention_forward(ctx, {.shape = shape,
                          .q_TC = of.q(of.qkv),
                          .k_TC = of.k(of.qkv),
                          .v_TC = of.v(of.qkv),
                          .cu_seqlens_B1 = of.cu_seqlens,
                          .out_TC = of.out,
                          .lse_HT = of.lse});
  attention_backward(ctx, {.shape = shape,
                           .q_TC = of.q(of.qkv),
                           .k_TC = of.k(of.qkv),
                           .v_TC = of.v(of.qkv),
                           .cu_seqlens_B1 = of.cu_seqlens,
                           .out_TC = of.out,
                           .lse_HT = of.lse,
                           .dout_TC = of.dout,
                           .dq_TC = of.q(of.dqkv),
                           .dk_TC = of.k(of.dqkv),
                           .dv_TC = of.v(of.dqkv)});
}

// Columns [begin, begin + count) of rows of `width`.
Values band(const Values& rows, int64_t width, int64_t begin, int64_t count) {
  Values columns;
  for (auto row = rows.begin(); row != rows.end(); row += width) {
    columns.insert(columns.end(), row + begin, row + begin + count);
  }
  return columns;
}

TEST_F(CudaLargeAttentionTest, AttentionOfTokensBeyond2To31Elements) {
  const AttentionShape shape{kHeads, kKeyValueHeads, kHead, kLength, std::nullopt};
  const size_t scratch_bytes = attention_scratch_bytes(Device::kCuda, shape, kRows, 1);
  BIOMOE_REQUIRE_GPU_MEMORY(26 + (scratch_bytes >> 30));
  Large qkv(ctx(), DType::kBF16, {kRows, kQkvWidth}), dqkv(ctx(), DType::kBF16, {kRows, kQkvWidth}),
      out(ctx(), DType::kBF16, {kRows, kQueryWidth}), dout(ctx(), DType::kBF16, {kRows, kQueryWidth}),
      lse(ctx(), DType::kF32, {kHeads, kRows});
  const Table table(ctx(), 1, kQkvWidth), gradients(ctx(), 2, kQueryWidth);
  Filler first(ctx(), 3, kRows), second(ctx(), 4, kRows);
  first.fill(table, qkv.view());
  second.fill(gradients, dout.view());
  GpuTensor cu_seqlens(ctx(), DType::kI32, Shape{kRows / kLength + 1});
  Values bounds;
  for (int64_t begin = 0; begin <= kRows; begin += kLength) bounds.push_back(static_cast<double>(begin));
  cu_seqlens.set(bounds);
  forward_and_backward(with_scratch(scratch_bytes), shape,
                       {qkv.view(), cu_seqlens.view(), out.view(), lse.view(), dout.view(), dqkv.view()});

  // A sequence on the CPU alone. Elements 2^31 of rows as wide as qkv, and as queries, are in the second and
  // the third.
  constexpr int64_t kElement = int64_t{1} << 31;
  for (const int64_t sequence :
       {int64_t{0}, kElement / kQkvWidth / kLength, kElement / kQueryWidth / kLength, kRows / kLength - 1}) {
    SCOPED_TRACE(fmt::format("sequence {}", sequence));
    std::vector<int64_t> tokens(kLength);
    std::iota(tokens.begin(), tokens.end(), sequence * kLength);
    Tensor<float> host_qkv(Shape{kLength, kQkvWidth}), host_dqkv(Shape{kLength, kQkvWidth}),
        host_out(Shape{kLength, kQueryWidth}), host_dout(Shape{kLength, kQueryWidth}),
        host_lse(Shape{kHeads, kLength});
    Tensor<int32_t> host_bounds(Shape{2});
    host_qkv.set(first.rows(table, tokens));
    host_dout.set(second.rows(gradients, tokens));
    host_bounds.set({0, static_cast<double>(kLength)});
    TestContext cpu(2, attention_scratch_bytes(Device::kCpu, shape, kLength, 2));
    forward_and_backward(*cpu, shape,
                         {host_qkv.view(), host_bounds.view(), host_out.view(), host_lse.view(),
                          host_dout.view(), host_dqkv.view()});
    EXPECT_CLOSE(out.rows(tokens), host_out.values(), DType::kBF16);
    const Values got = dqkv.rows(tokens), want = host_dqkv.values();
    const std::pair<int64_t, int64_t> bands[] = {
        {0, kQueryWidth}, {kQueryWidth, kKeyWidth}, {kQueryWidth + kKeyWidth, kKeyWidth}};
    for (const auto& [begin, count] : bands) {
      EXPECT_CLOSE(band(got, kQkvWidth, begin, count), band(want, kQkvWidth, begin, count), DType::kBF16)
          << "gradient of columns from " << begin;
    }
  }
}

using CudaLargeLossTest = GpuTest;

TEST_F(CudaLargeLossTest, LossOfLogitsBeyond2To31Elements) {
  BIOMOE_REQUIRE_GPU_MEMORY(6);
  constexpr int64_t kTokens = 70000, kVocabulary = 32000, kBorder = (int64_t{1} << 31) / kVocabulary;
  constexpr double kScale = 0.7;
  static_assert(kTokens * kVocabulary > int64_t{1} << 31);
  Large logits(ctx(), DType::kBF16, {kTokens, kVocabulary});
  const Table table(ctx(), 1, kVocabulary, 3.0);
  Filler filler(ctx(), 2, kTokens);
  filler.fill(table, logits.view());
  const std::vector<int32_t> targets = ids(3, kTokens, kVocabulary);
  GpuTensor target(ctx(), DType::kI32, Shape{kTokens}), weight(ctx(), DType::kF32, Shape{kTokens}),
      nll(ctx(), DType::kF32, Shape{kTokens}), scale(ctx(), DType::kF64, Shape{1}),
      sums(ctx(), DType::kF64, Shape{3});
  target.set(doubles(targets));
  weight.fill(1.0);
  scale.fill(kScale);
  sums.fill(0.0);
  cross_entropy(ctx(), {.logits_TV = logits.view(),
                        .targets_T = target.view(),
                        .weights_T = weight.view(),
                        .nll_T = nll.view(),
                        .grad_scale_1 = scale.view(),
                        .write_gradient = true});
  loss_sums(ctx(), {.nll_T = nll.view(), .weights_T = weight.view(), .sums_3 = sums.view()});
  // Every row's loss, from what the rows of the table have in common.
  Values lse;
  for (int32_t id = 0; id < kTableRows; ++id) {
    const Values row = table.row(id);
    double sum = 0;
    for (const double value : row) sum += std::exp(value);
    lse.push_back(std::log(sum));
  }
  Values want;
  double total = 0;
  for (int64_t t = 0; t < kTokens; ++t) {
    const auto at = static_cast<size_t>(t);
    const int32_t id = filler.tokens[at];
    want.push_back(lse[static_cast<size_t>(id)] -
                   table.values[static_cast<size_t>(id * kVocabulary + targets[at])]);
    total += want.back();
  }
  EXPECT_CLOSE(nll.values(), want, DType::kF32);
  const Values got_sums = sums.values();
  EXPECT_NEAR(got_sums[0], total, 1e-6 * total);
  EXPECT_EQ(got_sums[2], static_cast<double>(kTokens));
  for (const int64_t t : {int64_t{0}, kBorder - 1, kBorder, kBorder + 1, kTokens - 1}) {
    const std::vector<int32_t> one{targets[static_cast<size_t>(t)]};
    Values gradient =
        ref::cross_entropy(filler.row(table, t), one, {1.0}, static_cast<size_t>(kVocabulary)).dlogits;
    for (double& value : gradient) value *= kScale;
    EXPECT_CLOSE(logits.row(t), gradient, DType::kBF16) << "row " << t;
  }
}

}  // namespace
}  // namespace biomoe::test
