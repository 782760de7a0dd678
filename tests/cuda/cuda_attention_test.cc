#include "biomoe/ops/attention.h"

#include "biomoe/ops/attention_calls.h"
#include "tests/cuda/gpu_test.h"

namespace biomoe::test {
namespace {

struct Case {
  int64_t heads, kv_heads, width;
  std::vector<int64_t> lengths;
  std::optional<int64_t> window = {};
  int64_t planned_seqlen = 0;  // the longest that is planned for, if longer than any here
  int64_t unused = 0;          // sequences of length 0 after the others
};

std::vector<double> cu_seqlens_of(const Case& attention_case) {
  std::vector<double> cu_seqlens{0};
  for (int64_t length : attention_case.lengths) {
    cu_seqlens.push_back(cu_seqlens.back() + static_cast<double>(length));
  }
  for (int64_t i = 0; i < attention_case.unused; ++i) cu_seqlens.push_back(cu_seqlens.back());
  return cu_seqlens;
}

AttentionShape shape_of(const Case& attention_case) {
  AttentionShape shape{attention_case.heads, attention_case.kv_heads, attention_case.width,
                       attention_case.planned_seqlen, attention_case.window};
  for (int64_t length : attention_case.lengths) shape.max_seqlen = std::max(shape.max_seqlen, length);
  return shape;
}

// The qkv matrix and what is beside it, in either kind of memory.
struct Views {
  TensorView qkv, cu_seqlens, out, lse, dout, dqkv;
};

AttentionForwardArgs forward_args(const AttentionShape& shape, const Views& views) {
  const int64_t q = shape.num_heads * shape.head_dim, kv = shape.num_key_value_heads * shape.head_dim;
  return {.shape = shape,
          .q_TC = views.qkv.columns(0, q),
          .k_TC = views.qkv.columns(q, kv),
          .v_TC = views.qkv.columns(q + kv, kv),
          .cu_seqlens_B1 = views.cu_seqlens,
          .out_TC = views.out,
          .lse_HT = views.lse};
}

AttentionBackwardArgs backward_args(const AttentionShape& shape, const Views& views) {
  const AttentionForwardArgs inputs = forward_args(shape, views);
  const int64_t q = shape.num_heads * shape.head_dim, kv = shape.num_key_value_heads * shape.head_dim;
  return {.shape = shape,
          .q_TC = inputs.q_TC,
          .k_TC = inputs.k_TC,
          .v_TC = inputs.v_TC,
          .cu_seqlens_B1 = inputs.cu_seqlens_B1,
          .out_TC = inputs.out_TC,
          .lse_HT = inputs.lse_HT,
          .dout_TC = views.dout,
          .dq_TC = views.dqkv.columns(0, q),
          .dk_TC = views.dqkv.columns(q, kv),
          .dv_TC = views.dqkv.columns(q + kv, kv)};
}

struct Values {
  std::vector<double> out, lse, dqkv;
};

// What the CPU computes in fp32 from the same bf16 inputs.
Values on_cpu(const Case& attention_case, const std::vector<double>& qkv_values,
              const std::vector<double>& dout_values) {
  const AttentionShape shape = shape_of(attention_case);
  const auto cu = cu_seqlens_of(attention_case);
  const auto tokens = static_cast<int64_t>(cu.back());
  const int64_t q = shape.num_heads * shape.head_dim, kv = shape.num_key_value_heads * shape.head_dim;
  Tensor<float> qkv(Shape{tokens, q + 2 * kv}), dqkv(Shape{tokens, q + 2 * kv}), out(Shape{tokens, q});
  Tensor<float> dout(Shape{tokens, q}), lse(Shape{shape.num_heads, tokens});
  Tensor<int32_t> cu_seqlens(Shape{static_cast<int64_t>(cu.size())});
  qkv.set(qkv_values);
  dout.set(dout_values);
  cu_seqlens.set(cu);
  TestContext ctx(2, attention_scratch_bytes(Device::kCpu, shape, tokens, 2));
  const Views views{qkv.view(), cu_seqlens.view(), out.view(), lse.view(), dout.view(), dqkv.view()};
  attention_forward(*ctx, forward_args(shape, views));
  attention_backward(*ctx, backward_args(shape, views));
  return {out.values(), lse.values(), dqkv.values()};
}

// One case on the GPU, with poisoned outputs and scratch memory of the planned size.
class OnGpu {
 public:
  explicit OnGpu(const Case& attention_case, bool deterministic = false, bool portable_kernels = false)
      : shape(shape_of(attention_case)),
        cu(cu_seqlens_of(attention_case)),
        tokens(static_cast<int64_t>(cu.back())),
        width(shape.num_heads * shape.head_dim),
        gpu(attention_scratch_bytes(Device::kCuda, shape, tokens, 1, deterministic)),
        qkv(*gpu, DType::kBF16, Shape{tokens, width + 2 * shape.num_key_value_heads * shape.head_dim}, 8),
        cu_seqlens(*gpu, DType::kI32, Shape{static_cast<int64_t>(cu.size())}),
        out(*gpu, DType::kBF16, Shape{tokens, width}, 16),
        lse(*gpu, DType::kF32, Shape{shape.num_heads, tokens}),
        dout(*gpu, DType::kBF16, Shape{tokens, width}),
        dqkv(*gpu, DType::kBF16, Shape{tokens, width + 2 * shape.num_key_value_heads * shape.head_dim}, 24),
        qkv_values(normals(1, qkv.view().num_elements(), DType::kBF16)),
        dout_values(normals(2, tokens * width, DType::kBF16)) {
    gpu->deterministic = deterministic;
    gpu->portable_kernels = portable_kernels;
    qkv.set(qkv_values);
    dout.set(dout_values);
    cu_seqlens.set(cu);
  }

  void forward() { attention_forward(*gpu, forward_args(shape, views())); }
  void backward() { attention_backward(*gpu, backward_args(shape, views())); }
  void poison() {
    out.poison();
    lse.poison();
    dqkv.poison();
    device_wait_sync(*gpu);
    gpu.scratch().poison_free();
  }
  void run() {
    poison();
    forward();
    device_wait_sync(*gpu);
    gpu.scratch().poison_free();
    backward();
    EXPECT_EQ(gpu.scratch().used(), 0u);
  }

  Views views() const {
    return {qkv.view(), cu_seqlens.view(), out.view(), lse.view(), dout.view(), dqkv.view()};
  }
  // [H, T], from the [T, H] that cuDNN gets.
  std::vector<double> lse_by_head() {
    const auto by_token = lse.values();
    std::vector<double> by_head;
    for (int64_t h = 0; h < shape.num_heads; ++h) {
      for (int64_t t = 0; t < tokens; ++t)
        by_head.push_back(by_token[static_cast<size_t>(t * shape.num_heads + h)]);
    }
    return by_head;
  }
  std::vector<double> gradient_row(int64_t token, int64_t begin, int64_t count) {
    const auto all = dqkv.values();
    const auto first = all.begin() + token * dqkv.view().shape[1] + begin;
    return {first, first + count};
  }
  // Columns [begin, begin + count) of the rows of a gradient.
  std::vector<double> band(const std::vector<double>& rows, int64_t begin, int64_t count) const {
    const int64_t row = dqkv.view().shape[1];
    std::vector<double> columns;
    for (int64_t t = 0; t < tokens; ++t) {
      const auto first = rows.begin() + t * row + begin;
      columns.insert(columns.end(), first, first + count);
    }
    return columns;
  }
  // With the CPU's of the same inputs. Log sum exps are fp32 throughout, with exponentials of 22 digits.
  void expect_close(const Case& attention_case) {
    const Values want = on_cpu(attention_case, qkv_values, dout_values);
    EXPECT_CLOSE(out.values(), want.out, DType::kBF16);
    EXPECT_LE(unit_error(lse_by_head(), want.lse), 1e-5);
    const int64_t kv = shape.num_key_value_heads * shape.head_dim;
    const auto got_gradients = dqkv.values();
    EXPECT_CLOSE(band(got_gradients, 0, width), band(want.dqkv, 0, width), DType::kBF16) << "dq";
    EXPECT_CLOSE(band(got_gradients, width, kv), band(want.dqkv, width, kv), DType::kBF16) << "dk";
    EXPECT_CLOSE(band(got_gradients, width + kv, kv), band(want.dqkv, width + kv, kv), DType::kBF16) << "dv";
    EXPECT_TRUE(out.padding_untouched() && dqkv.padding_untouched() && lse.padding_untouched());
  }

  AttentionShape shape;
  std::vector<double> cu;
  int64_t tokens, width;
  GpuContext gpu;
  GpuTensor qkv, cu_seqlens, out, lse, dout, dqkv;
  std::vector<double> qkv_values, dout_values;
};

class CudaAttentionTest : public testing::TestWithParam<Case> {};

TEST_P(CudaAttentionTest, MatchesTheCpuOnTheSameInputs) {
  BIOMOE_REQUIRE_GPU();
  OnGpu on_gpu(GetParam());
  on_gpu.run();
  on_gpu.expect_close(GetParam());
}

TEST_P(CudaAttentionTest, IsBitwiseRepeatableWhereDeterministic) {
  BIOMOE_REQUIRE_GPU();
  OnGpu on_gpu(GetParam(), true);
  on_gpu.run();
  on_gpu.expect_close(GetParam());
  const auto out = on_gpu.out.bytes(), lse = on_gpu.lse.bytes(), dqkv = on_gpu.dqkv.bytes();
  for (int run = 0; run < 3; ++run) {
    on_gpu.run();
    EXPECT_EQ(on_gpu.out.bytes(), out);
    EXPECT_EQ(on_gpu.lse.bytes(), lse);
    EXPECT_EQ(on_gpu.dqkv.bytes(), dqkv);
  }
}

// What GPUs run on that cuDNN has nothing for; its order of sums is always the same.
TEST_P(CudaAttentionTest, InTilesMatchesTheCpuAndRepeats) {
  BIOMOE_REQUIRE_GPU();
  OnGpu on_gpu(GetParam(), false, true);
  on_gpu.run();
  on_gpu.expect_close(GetParam());
  const auto out = on_gpu.out.bytes(), lse = on_gpu.lse.bytes(), dqkv = on_gpu.dqkv.bytes();
  on_gpu.run();
  EXPECT_EQ(on_gpu.out.bytes(), out);
  EXPECT_EQ(on_gpu.lse.bytes(), lse);
  EXPECT_EQ(on_gpu.dqkv.bytes(), dqkv);
}

// The softmax of one score is constant: nothing may reach its query, nor its key when no other query sees it.
class CudaSingleKeyTest : public testing::TestWithParam<std::tuple<Case, bool>> {};
TEST_P(CudaSingleKeyTest, GivesSingleKeyRowsNoScoreGradient) {
  BIOMOE_REQUIRE_GPU();
  const auto& [attention_case, portable_kernels] = GetParam();
  OnGpu on_gpu(attention_case, false, portable_kernels);
  on_gpu.run();
  const int64_t kv_width = on_gpu.shape.num_key_value_heads * on_gpu.shape.head_dim;
  const auto zeros = [](int64_t count) { return std::vector<double>(static_cast<size_t>(count), 0.0); };
  int64_t begin = 0;
  for (int64_t length : attention_case.lengths) {
    for (int64_t t = begin; t < begin + length; ++t) {
      if (t > begin && attention_case.window != 1) break;
      EXPECT_EQ(on_gpu.gradient_row(t, 0, on_gpu.width), zeros(on_gpu.width)) << t;
      if (length > 1 && attention_case.window != 1) continue;
      EXPECT_EQ(on_gpu.gradient_row(t, on_gpu.width, kv_width), zeros(kv_width)) << t;
    }
    begin += length;
  }
}

const auto kCases = testing::Values(
    Case{2, 2, 64, {1}}, Case{2, 1, 128, {2, 1, 1}}, Case{4, 2, 64, {127, 128, 129}},
    Case{4, 4, 128, {3, 0, 5, 0}}, Case{8, 2, 128, {1000}}, Case{8, 2, 128, {1, 1000, 2, 127}},
    Case{4, 1, 128, {130, 257, 64}}, Case{4, 2, 128, {300, 200}, 1}, Case{4, 2, 128, {300, 200}, 2},
    Case{4, 2, 128, {300, 200}, 128}, Case{4, 2, 64, {300, 200}, 129}, Case{4, 2, 128, {300, 200}, 1000},
    Case{4, 2, 128, {100, 60, 33}, {}, 2048, 13}, Case{2, 2, 128, {5, 7}, 3, 512, 62},
    Case{4, 2, 128, {0, 0}, {}, 64}, Case{32, 8, 128, {513, 300}}, Case{2, 1, 32, {70, 90}},
    Case{2, 2, 128, {2500}});
INSTANTIATE_TEST_SUITE_P(Cases, CudaAttentionTest, kCases);
INSTANTIATE_TEST_SUITE_P(Cases, CudaSingleKeyTest, testing::Combine(kCases, testing::Bool()));

// What a run does: one recorded step, replayed for batches that are cut into sequences otherwise.
TEST(CudaAttentionTest, ReplaysOneRecordedStepForBatchesOfOtherSequences) {
  BIOMOE_REQUIRE_GPU();
  for (bool deterministic : {false, true}) {
    Case attention_case{8, 2, 128, {400, 300, 200}, {}, 900, 5};
    OnGpu on_gpu(attention_case, deterministic);
    on_gpu.run();
    RecordedStep::begin(*on_gpu.gpu);
    on_gpu.forward();
    on_gpu.backward();
    const RecordedStep step = RecordedStep::end(*on_gpu.gpu);
    const std::vector<std::vector<int64_t>> batches = {
        {900, 0, 0, 0}, {1, 1, 1, 897}, {100, 100, 100, 100, 100, 100, 100, 200}, {400, 300, 200}};
    for (const auto& lengths : batches) {
      attention_case.lengths = lengths;
      attention_case.unused = 8 - static_cast<int64_t>(lengths.size());
      on_gpu.cu_seqlens.set(cu_seqlens_of(attention_case));
      on_gpu.poison();
      step.replay(*on_gpu.gpu);
      on_gpu.expect_close(attention_case);
    }
  }
}

// Forward only: backward multiplies what its tiles hold of the next sequence by 0, which leaves a NaN one
// (the step then stops before its update, since the loss is not finite).
TEST(CudaAttentionTest, NanOfOneSequenceReachesNoOtherSequencesOutput) {
  BIOMOE_REQUIRE_GPU();
  for (const int64_t faulty : {int64_t{0}, int64_t{1}, int64_t{2}}) {
    const std::vector<int64_t> lengths = {70, 200, 130};
    OnGpu on_gpu(Case{4, 2, 128, lengths});
    on_gpu.run();
    const auto want = on_gpu.out.values();
    int64_t begin = 0;
    for (int64_t b = 0; b < faulty; ++b) begin += lengths[static_cast<size_t>(b)];
    const int64_t end = begin + lengths[static_cast<size_t>(faulty)];
    const int64_t row = on_gpu.qkv.view().shape[1];
    auto values = on_gpu.qkv_values;
    for (int64_t i = begin * row; i < end * row; ++i) values[static_cast<size_t>(i)] = std::nan("");
    on_gpu.qkv.set(values);
    on_gpu.run();
    const auto got = on_gpu.out.values();
    for (int64_t t = 0; t < on_gpu.tokens; ++t) {
      if (t >= begin && t < end) continue;
      for (int64_t i = 0; i < on_gpu.width; ++i) {
        const auto at = static_cast<size_t>(t * on_gpu.width + i);
        ASSERT_EQ(got[at], want[at]) << "token " << t << ", sequence " << faulty << " is NaN";
      }
    }
  }
}

TEST(CudaAttentionTest, RefusesWhatItCannotDoInALine) {
  BIOMOE_REQUIRE_GPU();
  GpuContext gpu(size_t{1} << 20);
  const auto refused = [&](DType dtype, int64_t width) {
    const AttentionShape shape{1, 1, width, 4, {}};
    GpuTensor qkv(*gpu, dtype, Shape{4, 3 * width}), out(*gpu, dtype, Shape{4, width});
    GpuTensor lse(*gpu, DType::kF32, Shape{1, 4}), cu_seqlens(*gpu, DType::kI32, Shape{2});
    const Views views{qkv.view(), cu_seqlens.view(), out.view(), lse.view(), {}, {}};
    try {
      attention_forward(*gpu, forward_args(shape, views));
    } catch (const Error& error) {
      return error.kind() == ErrorKind::kUser;
    }
    return false;
  };
  EXPECT_TRUE(refused(DType::kF32, 64));
  EXPECT_TRUE(refused(DType::kBF16, 24));
  EXPECT_TRUE(refused(DType::kBF16, 272));
  gpu->portable_kernels = true;
  EXPECT_TRUE(refused(DType::kF32, 64));
  EXPECT_TRUE(refused(DType::kBF16, 24));
  EXPECT_TRUE(refused(DType::kBF16, 272));
}

// The last tokens of one sequence, with their keys among those of all of it.
TEST(CudaAttentionDecodeTest, GivesTheLastRowsOfTheWholeSequence) {
  BIOMOE_REQUIRE_GPU();
  for (const Case& attention_case : {Case{4, 2, 64, {333}}, Case{8, 2, 128, {700}, 100}, Case{4, 1, 16, {65}},
                                     Case{2, 1, 256, {200}}, Case{2, 2, 80, {129}, 1}}) {
    OnGpu on_gpu(attention_case);
    const Values want = on_cpu(attention_case, on_gpu.qkv_values, on_gpu.dout_values);
    const AttentionForwardArgs all = forward_args(on_gpu.shape, on_gpu.views());
    for (const int64_t keys : {int64_t{1}, int64_t{64}, on_gpu.tokens}) {
      for (const int64_t queries : {int64_t{1}, int64_t{2}, int64_t{63}, int64_t{65}, keys}) {
        if (queries > keys) continue;
        on_gpu.out.poison();
        attention_decode(*on_gpu.gpu, {.shape = on_gpu.shape,
                                       .q_TC = all.q_TC.rows(keys - queries, queries),
                                       .k_PC = all.k_TC.rows(0, keys),
                                       .v_PC = all.v_TC.rows(0, keys),
                                       .out_TC = on_gpu.out.view().rows(keys - queries, queries)});
        const auto rows = [&](const std::vector<double>& values) {
          return std::vector<double>(values.begin() + (keys - queries) * on_gpu.width,
                                     values.begin() + keys * on_gpu.width);
        };
        EXPECT_CLOSE(rows(on_gpu.out.values()), rows(want.out), DType::kBF16) << queries << " of " << keys;
        EXPECT_TRUE(on_gpu.out.padding_untouched());
      }
    }
  }
}

// Host arithmetic: needs no GPU.
TEST(CudaAttentionCallsTest, CutsBackwardInAFixedOrderToBoundedMemory) {
  const AttentionShape shape{32, 8, 128, 8192, {}};
  for (int64_t sequences : {1, 3, 32, 1000}) {
    const auto whole = cuda::attention_calls(shape, sequences, 16384, false);
    EXPECT_EQ(whole.key_value_heads, 8);
    EXPECT_GE(whole.count * whole.sequences, sequences);
    EXPECT_LE(whole.sequences * whole.max_seqlen, 2 * 16384);
    const auto cut = cuda::attention_calls(shape, sequences, 16384, true);
    EXPECT_GE(cut.count * cut.sequences, sequences);
    EXPECT_EQ(8 % cut.key_value_heads, 0);
    const auto heads = static_cast<size_t>(cut.sequences * cut.key_value_heads * 4);
    const size_t scores = 2 * heads * static_cast<size_t>(cut.max_seqlen * cut.max_seqlen);
    EXPECT_LE(scores, attention_scratch_bytes(Device::kCuda, shape, 16384, 1, true));
    EXPECT_LE(scores, size_t{1} << 30);
  }
  EXPECT_EQ(attention_scratch_bytes(Device::kCuda, shape, 0, 1), 0u);
}

}  // namespace
}  // namespace biomoe::test
