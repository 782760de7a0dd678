// Products of experts in BF16 on the GPU, as training calls them, against the same operations in fp32 on the
// CPU.
#include "biomoe/ops/grouped_gemm.h"

#include "biomoe/ops/scaled_swiglu.h"
#include "tests/cuda/gpu_expert_rows.h"

namespace biomoe::test {
namespace {

constexpr DType kType = DType::kBF16;
constexpr int64_t kInterleave = cuda::kGateUpInterleave;

struct Case {
  std::vector<int64_t> counts;  // rows of the experts
  int64_t in, out;              // of the products beside the activation: its width is `out`
};

void PrintTo(const Case& c, std::ostream* to) {
  *to << testing::PrintToString(c.counts) << " rows, " << c.in << " -> " << c.out;
}

// Numbers that BF16 holds, on the host and on the GPU.
struct Operand {
  Tensor<float> host;
  std::unique_ptr<GpuTensor> device;
};

class CudaGroupedGemmTest : public HopperTest, public testing::WithParamInterface<Case> {
 protected:
  void SetUp() override {
    HopperTest::SetUp();
    if (IsSkipped()) return;
    rows_.emplace(ctx(), GetParam().counts);
    cpu_.num_threads = 2;
    host_offsets_.emplace(Shape{experts() + 1});
    host_offsets_->set({rows_->offsets().begin(), rows_->offsets().end()});
  }

  int64_t experts() const { return rows_->experts(); }
  TensorView host_offsets() { return host_offsets_->view(); }
  Shape used(int64_t columns) const { return Shape{rows_->used(), columns}; }

  Operand rows(uint64_t seed, int64_t columns) {
    const std::vector<double> values = rows_->normal_rows(seed, columns, kType);
    Operand to{Tensor<float>(used(columns)), poisoned_rows(columns)};
    to.host.set(values);
    to.device->set(rows_->with_spare(values, columns));
    return to;
  }
  Operand weights(uint64_t seed, int64_t out, int64_t in) {
    const Shape shape{experts(), out, in};
    const std::vector<double> values =
        normals(seed, shape.num_elements(), kType, 1.0 / std::sqrt(static_cast<double>(in)));
    Operand to{Tensor<float>(shape), std::make_unique<GpuTensor>(ctx(), kType, shape)};
    to.host.set(values);
    to.device->set(values);
    return to;
  }
  // Of rows and slots; NaN in rows of nobody.
  Operand probs(uint64_t seed) {
    const std::vector<double> values = rows_->normal_rows(seed, 1, DType::kF32, 0.5);
    Operand to{Tensor<float>(Shape{rows_->used()}),
               std::make_unique<GpuTensor>(ctx(), DType::kF32, Shape{rows_->capacity()})};
    to.host.set(values);
    to.device->set(rows_->with_spare(values, 1));
    return to;
  }
  std::unique_ptr<GpuTensor> poisoned_rows(int64_t columns) {
    return std::make_unique<GpuTensor>(ctx(), kType, Shape{rows_->capacity(), columns});
  }

  GroupedGemmArgs on_cpu(Operand& x, Operand& w, Operand& y) {
    return {
        .x_RI = x.host.view(), .w_EOI = w.host.view(), .y_RO = y.host.view(), .offsets_E1 = host_offsets()};
  }
  GroupedGemmArgs on_gpu(const Operand& x, const Operand& w, const Operand& y) const {
    return {.x_RI = x.device->view(),
            .w_EOI = w.device->view(),
            .y_RO = y.device->view(),
            .offsets_E1 = rows_->offsets_E1(),
            .rows_E = rows_->rows_E()};
  }
  Operand result(int64_t columns) { return {Tensor<float>(used(columns)), poisoned_rows(columns)}; }

  // `got` [experts, out, in]: every expert at the scale of its own.
  void expect_weights(const std::vector<double>& got, const std::vector<double>& want, DType dtype,
                      const std::string& what) const {
    const int64_t size = GetParam().in * GetParam().out;
    for (int64_t e = 0; e < experts(); ++e) {
      const auto part = [&](const std::vector<double>& of) {
        return std::vector<double>(of.begin() + e * size, of.begin() + (e + 1) * size);
      };
      const int64_t count = rows_->counts()[static_cast<size_t>(e)];
      EXPECT_LE(unit_error(part(got), part(want)), product_tolerance(kType, dtype, count))
          << what << ", expert " << e << " of " << count
          << " rows: " << furthest(part(got), part(want), GetParam().in);
    }
  }

  std::optional<GpuExpertRows> rows_;
  Context cpu_;

 private:
  std::optional<Tensor<int64_t>> host_offsets_;
};

TEST_P(CudaGroupedGemmTest, ForwardAndDgrad) {
  const auto& [counts, in, out] = GetParam();
  Operand w = weights(1, out, in);
  for (const bool dgrad : {false, true}) {
    Operand x = dgrad ? result(in) : rows(2, in), y = dgrad ? rows(3, out) : result(out);
    Operand& to = dgrad ? x : y;
    const char* what = dgrad ? "dgrad" : "forward";
    const auto run = [dgrad](Context& context, const GroupedGemmArgs& args) {
      dgrad ? grouped_gemm_dgrad(context, args) : grouped_gemm_forward(context, args);
    };
    run(cpu_, on_cpu(x, w, y));
    run(ctx(), on_gpu(x, w, y));
    rows_->expect(to.device->values(), to.host.values(), dgrad ? in : out, kType, what);
    const std::vector<uint8_t> first = to.device->bytes();
    to.device->poison();
    run(ctx(), on_gpu(x, w, y));
    EXPECT_TRUE(first == to.device->bytes()) << what << ": not the same twice";
  }
}

// Assigned in BF16, with and without sums of squares, and added to in both types.
TEST_P(CudaGroupedGemmTest, Wgrad) {
  const auto& [counts, in, out] = GetParam();
  Operand x = rows(2, in), y = rows(3, out);
  const Shape shape{experts(), out, in};
  Operand dw{Tensor<float>(shape), std::make_unique<GpuTensor>(ctx(), kType, shape)};
  grouped_gemm_wgrad(cpu_, on_cpu(x, dw, y));
  const std::vector<double> product = dw.host.values();
  GroupedGemmArgs args = on_gpu(x, dw, y);
  grouped_gemm_wgrad(ctx(), args);
  expect_weights(dw.device->values(), product, kType, "assigned");
  const std::vector<uint8_t> first = dw.device->bytes();
  dw.device->poison();
  GpuTensor squares(ctx(), DType::kF32, Shape{wgrad_squares_count(Device::kCuda, experts(), out, in)});
  args.squares_P = squares.view();
  grouped_gemm_wgrad(ctx(), args);
  EXPECT_TRUE(first == dw.device->bytes()) << "not the same with sums of squares";
  const std::vector<double> stored = dw.device->values(), parts = squares.values();
  const double sum = std::inner_product(stored.begin(), stored.end(), stored.begin(), 0.0);
  EXPECT_NEAR(std::accumulate(parts.begin(), parts.end(), 0.0), sum, 1e-5 * sum);
  args.accumulate = true;
  args.squares_P = {};
  const std::vector<double> before = normals(5, shape.num_elements(), kType, 3.0);
  for (const DType type : {DType::kBF16, DType::kF32}) {
    GpuTensor sums(ctx(), type, shape);
    sums.set(before);
    args.w_EOI = sums.view();
    grouped_gemm_wgrad(ctx(), args);
    expect_weights(sums.values(), sum_of(product, before), type,
                   std::string("added to ") + std::string(dtype_name(type)));
  }
}

// The products that have the activation in their epilogue.
class CudaFusedGroupedGemmTest : public CudaGroupedGemmTest {};

TEST_P(CudaFusedGroupedGemmTest, GateUp) {
  const auto& [counts, in, features] = GetParam();
  Operand x = rows(1, in), w = weights(2, 2 * features, in), prob = probs(3);
  Operand gate_up = result(2 * features), act = result(features);
  grouped_gate_up(cpu_, {.x_RD = x.host.view(),
                         .w_E2FD = w.host.view(),
                         .gate_up_R2F = gate_up.host.view(),
                         .probs_R = prob.host.view(),
                         .act_RF = act.host.view(),
                         .offsets_E1 = host_offsets(),
                         .interleave = kInterleave});
  grouped_gate_up(ctx(), {.x_RD = x.device->view(),
                          .w_E2FD = w.device->view(),
                          .gate_up_R2F = gate_up.device->view(),
                          .probs_R = prob.device->view(),
                          .act_RF = act.device->view(),
                          .offsets_E1 = rows_->offsets_E1(),
                          .rows_E = rows_->rows_E(),
                          .interleave = kInterleave});
  rows_->expect(gate_up.device->values(), gate_up.host.values(), 2 * features, kType, "gate_up");
  rows_->expect(act.device->values(), act.host.values(), features, kType, "act");
  const std::unique_ptr<GpuTensor> apart = poisoned_rows(features);
  scaled_swiglu_forward(ctx(), {.gate_up_R2F = gate_up.device->view(),
                                .probs_R = prob.device->view(),
                                .act_RF = apart->view(),
                                .offsets_E1 = rows_->offsets_E1(),
                                .interleave = kInterleave});
  EXPECT_TRUE(apart->bytes() == act.device->bytes()) << "not the bits of the activation apart";
}

TEST_P(CudaFusedGroupedGemmTest, DownBackward) {
  const auto& [counts, out, features] = GetParam();
  Operand dy = rows(1, out), w = weights(2, out, features), gate_up = rows(3, 2 * features), prob = probs(4);
  // dact is rounded to BF16 on its way.
  Operand dact = result(features), dgate_up = result(2 * features);
  Tensor<float> dprobs(Shape{rows_->used()});
  grouped_gemm_dgrad(cpu_, on_cpu(dact, w, dy));
  std::vector<double> rounded = dact.host.values();
  for (double& value : rounded) {
    value = static_cast<double>(float_from_bf16(bf16_from_float(static_cast<float>(value))));
  }
  dact.host.set(rounded);
  scaled_swiglu_backward(cpu_, {dact.host.view(), gate_up.host.view(), prob.host.view(), dgate_up.host.view(),
                                dprobs.view(), host_offsets(), kInterleave});
  GpuTensor got_dprobs(ctx(), DType::kF32, Shape{rows_->capacity()});
  GroupedDownBackwardArgs args{.dy_RD = dy.device->view(),
                               .w_EDF = w.device->view(),
                               .gate_up_R2F = gate_up.device->view(),
                               .probs_R = prob.device->view(),
                               .dact_RF = dact.device->view(),
                               .dgate_up_R2F = dgate_up.device->view(),
                               .dprobs_R = got_dprobs.view(),
                               .offsets_E1 = rows_->offsets_E1(),
                               .rows_E = rows_->rows_E(),
                               .interleave = kInterleave};
  grouped_down_backward(ctx(), args);
  rows_->expect(dgate_up.device->values(), dgate_up.host.values(), 2 * features, kType, "dgate_up");
  // A sum over features may cancel out in a row: all of them give the scale.
  const std::vector<double> want = dprobs.values();
  std::vector<double> got = got_dprobs.values();
  got.resize(want.size());
  EXPECT_LE(unit_error(got, want), tolerance(kType)) << "dprobs " << furthest(got, want, 1);
  // As training calls it: in the place of gate_up. Rows of nobody keep what was there.
  const std::vector<double> apart = dgate_up.device->values(), first_dprobs = got_dprobs.values();
  dact.device->poison();
  got_dprobs.poison();
  args.dgate_up_R2F = args.gate_up_R2F;
  grouped_down_backward(ctx(), args);
  EXPECT_EQ(unit_error(gate_up.device->values(), apart), 0.0) << "in place: other numbers";
  EXPECT_EQ(unit_error(got_dprobs.values(), first_dprobs), 0.0) << "in place: other dprobs";
}

const std::vector<int64_t> kEdges{0, 1, 31, 127, 128, 129, 255, 257, 700};

// So many rows over the experts, the first of which get most.
std::vector<int64_t> random_split(uint64_t seed, int64_t rows, int64_t experts) {
  const Rng rng(seed, RngStream::kTest);
  std::vector<int64_t> counts(static_cast<size_t>(experts), 0);
  for (int64_t r = 0; r < rows; ++r) {
    const double u = rng.uniform(static_cast<uint64_t>(r));
    ++counts[static_cast<size_t>(u * u * static_cast<double>(experts))];
  }
  return counts;
}

std::vector<Case> split_cases(int64_t in, int64_t out) {
  std::vector<Case> cases;
  const std::vector<std::vector<int64_t>> splits{
      {0, 0, 700, 0, 0}, {700}, {1}, {0, 0, 0}, std::vector<int64_t>(64, 3)};
  for (const auto& counts : splits) cases.push_back({counts, in, out});
  for (uint64_t seed = 1; seed <= 6; ++seed) {
    cases.push_back({random_split(seed, 1000, seed % 2 == 0 ? 64 : 8), in, out});
  }
  return cases;
}

// Around the tiles: sums of 64 at a time, 128 rows of a weight gradient, 256 columns; and the step of 8.
std::vector<Case> width_cases() {
  std::vector<Case> cases{{kEdges, 8, 8}, {kEdges, 776, 392}};
  const auto add = [&cases](const std::vector<int64_t>& ins, const std::vector<int64_t>& outs) {
    for (const int64_t in : ins) {
      for (const int64_t out : outs) cases.push_back({kEdges, in, out});
    }
  };
  add({56, 64, 72}, {248, 256, 264});
  add({248, 256, 264}, {56, 64, 72, 120, 128, 136});
  return cases;
}

// Widths of the activation go in steps of 32: around 128, the columns of a tile of gate and up, and around
// 256.
std::vector<Case> fused_width_cases() {
  std::vector<Case> cases{{kEdges, 8, 32}, {kEdges, 520, 352}};
  for (const int64_t width : {56, 64, 72}) {
    for (const int64_t features : {96, 128, 160, 224, 256, 288}) cases.push_back({kEdges, width, features});
  }
  return cases;
}

// Sums long enough for the tiles of few rows to be cut along them.
const Case kLongSums{{130, 60}, 2056, 1032};

INSTANTIATE_TEST_SUITE_P(Splits, CudaGroupedGemmTest, testing::ValuesIn(split_cases(136, 264)));
INSTANTIATE_TEST_SUITE_P(Widths, CudaGroupedGemmTest, testing::ValuesIn(width_cases()));
INSTANTIATE_TEST_SUITE_P(LongSums, CudaGroupedGemmTest, testing::Values(kLongSums));
INSTANTIATE_TEST_SUITE_P(Splits, CudaFusedGroupedGemmTest, testing::ValuesIn(split_cases(136, 160)));
INSTANTIATE_TEST_SUITE_P(Widths, CudaFusedGroupedGemmTest, testing::ValuesIn(fused_width_cases()));

}  // namespace
}  // namespace biomoe::test
