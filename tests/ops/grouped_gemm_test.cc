#include "biomoe/ops/grouped_gemm.h"

#include "biomoe/ops/scaled_swiglu.h"
#include "tests/ops/op_test.h"
#include "tests/ref/grouped_gemm.h"

namespace biomoe::test {
namespace {

struct Case {
  int64_t in, out;
  std::vector<int64_t> rows;  // of each expert
};

std::vector<int64_t> offsets_of(const std::vector<int64_t>& rows) {
  std::vector<int64_t> offsets{0};
  for (int64_t count : rows) offsets.push_back(offsets.back() + count);
  return offsets;
}

class GroupedGemmTest : public testing::TestWithParam<Case> {
 protected:
  GroupedGemmTest()
      : sizes_{GetParam().in, GetParam().out, offsets_of(GetParam().rows)},
        rows_(sizes_.offsets.back()),
        experts_(static_cast<int64_t>(GetParam().rows.size())),
        x_(Shape{rows_, sizes_.in}, 3),
        w_(Shape{experts_, sizes_.out, sizes_.in}),
        y_(Shape{rows_, sizes_.out}, 2),
        offsets_(Shape{experts_ + 1}) {
    x_.fill_normal(1);
    w_.fill_normal(2, 1.0 / std::sqrt(static_cast<double>(std::max<int64_t>(1, sizes_.in))));
    y_.fill_normal(3);
    for (int64_t e = 0; e <= experts_; ++e) offsets_.at(e) = sizes_.offsets[static_cast<size_t>(e)];
  }

  GroupedGemmArgs args(Tensor<float>& x, Tensor<float>& w, Tensor<float>& y) {
    return {.x_RI = x.view(),
            .w_EOI = w.view(),
            .y_RO = y.view(),
            .offsets_E1 = offsets_.view(),
            .accumulate = true};
  }

  ref::ExpertSizes sizes_;
  int64_t rows_, experts_;
  Tensor<float> x_, w_, y_;
  Tensor<int64_t> offsets_;
};

TEST_P(GroupedGemmTest, MatchesReferenceForAnyNumberOfThreads) {
  const auto want_y = ref::grouped_forward(sizes_, x_.values(), w_.values());
  const auto want_dx = ref::grouped_dgrad(sizes_, y_.values(), w_.values());
  Tensor<float> start(Shape{experts_, sizes_.out, sizes_.in});
  start.fill_normal(4);
  const auto want_dw = ref::grouped_wgrad(sizes_, y_.values(), x_.values(), start.values());
  Tensor<float> first_y(y_.shape(), 2), first_dx(x_.shape(), 3), first_dw = start;
  for (int threads : {1, 2, 3}) {
    TestContext ctx(threads);
    Tensor<float> y(y_.shape(), 2), dx(x_.shape(), 3), dw = start;
    grouped_gemm_forward(*ctx, args(x_, w_, y));
    grouped_gemm_dgrad(*ctx, args(dx, w_, y_));
    grouped_gemm_wgrad(*ctx, args(x_, dw, y_));
    EXPECT_CLOSE(y.values(), want_y, DType::kF32);
    EXPECT_CLOSE(dx.values(), want_dx, DType::kF32);
    EXPECT_CLOSE(dw.values(), want_dw, DType::kF32);
    EXPECT_TRUE(y.padding_untouched() && dx.padding_untouched() && dw.padding_untouched());
    if (threads == 1) {
      first_y = y;
      first_dx = dx;
      first_dw = dw;
    }
    EXPECT_TRUE(y.same_bits(first_y) && dx.same_bits(first_dx) && dw.same_bits(first_dw)) << threads;
  }
}

TEST_P(GroupedGemmTest, AnAssignedWeightGradientForgetsWhatWasThere) {
  TestContext ctx(2);
  Tensor<float> dw(w_.shape());  // NaN
  GroupedGemmArgs assign = args(x_, dw, y_);
  assign.accumulate = false;
  grouped_gemm_wgrad(*ctx, assign);
  const ref::Vector zeros(static_cast<size_t>(dw.size()), 0.0);
  EXPECT_CLOSE(dw.values(), ref::grouped_wgrad(sizes_, y_.values(), x_.values(), zeros), DType::kF32);
}

TEST_P(GroupedGemmTest, ExpertsWithoutRowsKeepTheirGradient) {
  TestContext ctx(2);
  Tensor<float> dw(w_.shape());  // NaN, and must stay what it is where no row adds to it
  const Tensor<float> before = dw;
  grouped_gemm_wgrad(*ctx, args(x_, dw, y_));
  const int64_t size = sizes_.out * sizes_.in;
  const auto bits = [](float value) { return std::bit_cast<uint32_t>(value); };
  for (int64_t e = 0; e < experts_; ++e) {
    if (GetParam().rows[static_cast<size_t>(e)] > 0) continue;
    for (int64_t i = 0; i < size; ++i) ASSERT_EQ(bits(dw.at(e, i)), bits(before.at(e, i)));
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, GroupedGemmTest,
                         testing::Values(Case{8, 4, {0}}, Case{8, 4, {0, 0, 0}}, Case{1, 1, {1}},
                                         Case{5, 7, {0, 1, 3, 0, 2}}, Case{0, 6, {2, 3}}, Case{6, 0, {2, 3}},
                                         Case{33, 65, {0, 0, 257, 0}}, Case{64, 96, {255, 1, 256, 0, 63}},
                                         Case{130, 520, {300, 0, 5}},
                                         Case{16, 24, std::vector<int64_t>(64, 1)}));

TEST(GroupedGemmTest, LeavesRowsBehindTheLastExpertAlone) {
  TestContext ctx(1);
  Tensor<float> x(Shape{5, 4}), w(Shape{2, 3, 4}), y(Shape{5, 3});
  Tensor<int64_t> offsets(Shape{3});
  x.fill(1);
  w.fill(1);
  offsets.set({0, 1, 3});
  grouped_gemm_forward(*ctx,
                       {.x_RI = x.view(), .w_EOI = w.view(), .y_RO = y.view(), .offsets_E1 = offsets.view()});
  EXPECT_EQ(y.at(2, 2), 4.0f);
  EXPECT_TRUE(std::isnan(y.at(3, 0)) && std::isnan(y.at(4, 2)));
}

TEST(GroupedGemmTest, NanStaysInItsExpert) {
  TestContext ctx(2);
  Tensor<float> x(Shape{4, 4}), w(Shape{2, 3, 4}), y(Shape{4, 3}), dw(Shape{2, 3, 4});
  Tensor<int64_t> offsets(Shape{3});
  x.fill(1).at(1, 1) = std::nanf("");
  w.fill(1);
  dw.fill(0);
  offsets.set({0, 2, 4});
  const GroupedGemmArgs forward{
      .x_RI = x.view(), .w_EOI = w.view(), .y_RO = y.view(), .offsets_E1 = offsets.view()};
  grouped_gemm_forward(*ctx, forward);
  EXPECT_TRUE(std::isnan(y.at(1, 0)));
  EXPECT_EQ(y.at(0, 0), 4.0f);
  y.fill(1);
  grouped_gemm_wgrad(*ctx, {.x_RI = x.view(),
                            .w_EOI = dw.view(),
                            .y_RO = y.view(),
                            .offsets_E1 = offsets.view(),
                            .accumulate = true});
  EXPECT_TRUE(std::isnan(dw.at(0, 1)));
  EXPECT_EQ(dw.at(1, 1), 2.0f);
}

// With the activation in its product an expert is cut by rows alone: into several parts, one, or none.
TEST(GroupedGemmTest, ActivationInsideGivesTheBitsOfTheActivationApart) {
  constexpr int64_t kWidth = 40, kExpertWidth = 24;
  const std::vector<int64_t> counts{0, 900, 5, 130, 0, 97};
  const std::vector<int64_t> bounds = offsets_of(counts);
  const auto experts = static_cast<int64_t>(counts.size());
  const int64_t rows = bounds.back() + 3;  // the last three are nobody's
  Tensor<float> x(Shape{rows, kWidth}), up(Shape{experts, 2 * kExpertWidth, kWidth}), probs(Shape{rows}),
      dy(Shape{rows, kWidth}), down(Shape{experts, kWidth, kExpertWidth});
  Tensor<int64_t> offsets(Shape{experts + 1});
  x.fill_normal(1);
  up.fill_normal(2);
  probs.fill_normal(3);
  dy.fill_normal(4);
  down.fill_normal(5);
  offsets.set(std::vector<double>(bounds.begin(), bounds.end()));
  const Shape wide{rows, 2 * kExpertWidth}, narrow{rows, kExpertWidth};
  for (const int64_t interleave : {0, 8}) {
    TestContext ctx(3);
    Tensor<float> want_up(wide), want_act(narrow), want_dact(narrow), want_dup(wide),
        want_dprobs(probs.shape());
    grouped_gemm_forward(
        *ctx, {.x_RI = x.view(), .w_EOI = up.view(), .y_RO = want_up.view(), .offsets_E1 = offsets.view()});
    scaled_swiglu_forward(*ctx, {want_up.view(), probs.view(), want_act.view(), offsets.view(), interleave});
    grouped_gemm_dgrad(
        *ctx,
        {.x_RI = want_dact.view(), .w_EOI = down.view(), .y_RO = dy.view(), .offsets_E1 = offsets.view()});
    scaled_swiglu_backward(*ctx, {want_dact.view(), want_up.view(), probs.view(), want_dup.view(),
                                  want_dprobs.view(), offsets.view(), interleave});
    Tensor<float> gate_up(wide), act(narrow), dact(narrow), dgate_up(wide), dprobs(probs.shape());
    grouped_gate_up(*ctx, {.x_RD = x.view(),
                           .w_E2FD = up.view(),
                           .gate_up_R2F = gate_up.view(),
                           .probs_R = probs.view(),
                           .act_RF = act.view(),
                           .offsets_E1 = offsets.view(),
                           .interleave = interleave});
    grouped_down_backward(*ctx, {.dy_RD = dy.view(),
                                 .w_EDF = down.view(),
                                 .gate_up_R2F = gate_up.view(),
                                 .probs_R = probs.view(),
                                 .dact_RF = dact.view(),
                                 .dgate_up_R2F = dgate_up.view(),
                                 .dprobs_R = dprobs.view(),
                                 .offsets_E1 = offsets.view(),
                                 .interleave = interleave});
    EXPECT_TRUE(gate_up.same_bits(want_up) && act.same_bits(want_act)) << interleave;
    EXPECT_TRUE(dgate_up.same_bits(want_dup) && dprobs.same_bits(want_dprobs)) << interleave;
  }
}

TEST(GroupedGemmTest, RefusesWrongShapesAndOffsets) {
  TestContext ctx(1);
  Tensor<float> x(Shape{4, 4}), w(Shape{2, 3, 4}), y(Shape{4, 3}), bad_y(Shape{3, 3});
  Tensor<int64_t> offsets(Shape{3});
  GroupedGemmArgs args{
      .x_RI = x.view(), .w_EOI = w.view(), .y_RO = bad_y.view(), .offsets_E1 = offsets.view()};
  EXPECT_THROW(grouped_gemm_forward(*ctx, args), Error);
  args.y_RO = y.view();
  for (const std::vector<double>& bad : {std::vector<double>{0, 3, 5}, {1, 2, 4}, {0, 3, 2}}) {
    offsets.set(bad);
    EXPECT_THROW(grouped_gemm_forward(*ctx, args), Error);
  }
}

TEST(GroupedGemmReferenceTest, GradientIsThatOfFiniteDifferences) {
  const ref::ExpertSizes sizes{3, 4, {0, 2, 2, 5}};
  Tensor<double> x(Shape{5, 3}), w(Shape{3, 4, 3}), dy(Shape{5, 4});
  x.fill_normal(1);
  w.fill_normal(2);
  dy.fill_normal(3);
  const auto of_x = [&](const ref::Vector& value) {
    return ref::dot(ref::grouped_forward(sizes, value, w.values()), dy.values());
  };
  const auto of_w = [&](const ref::Vector& value) {
    return ref::dot(ref::grouped_forward(sizes, x.values(), value), dy.values());
  };
  const auto dx = ref::grouped_dgrad(sizes, dy.values(), w.values());
  const auto dw = ref::grouped_wgrad(sizes, dy.values(), x.values(), ref::Vector(w.values().size(), 0.0));
  EXPECT_LE(ref::gradient_error(of_x, x.values(), dx), ref::kGradientTolerance);
  EXPECT_LE(ref::gradient_error(of_w, w.values(), dw), ref::kGradientTolerance);
}

}  // namespace
}  // namespace biomoe::test
