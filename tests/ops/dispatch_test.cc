#include "biomoe/ops/dispatch.h"

#include "tests/ops/op_test.h"
#include "tests/ref/dispatch.h"

namespace biomoe::test {
namespace {

struct Plan {
  Tensor<int64_t> offsets;
  Tensor<int32_t> rows, row_of_slot, slot_of_row;

  Plan(Context& ctx, Tensor<int32_t>& experts, int64_t num_experts, int64_t alignment = 1)
      : offsets(Shape{num_experts + 1}),
        rows(Shape{num_experts}),
        row_of_slot(Shape{experts.size()}),
        slot_of_row(Shape{row_capacity(experts.size(), num_experts, alignment)}) {
    dispatch_plan(ctx, {.experts_Tk = experts.view(),
                        .offsets_E1 = offsets.view(),
                        .rows_E = rows.view(),
                        .row_of_slot_N = row_of_slot.view(),
                        .slot_of_row_R = slot_of_row.view(),
                        .row_alignment = alignment});
  }
};

void expect_plan(const Plan& plan, const Tensor<int32_t>& experts, int64_t num_experts) {
  const auto want = ref::slots_by_expert(experts.elements());
  EXPECT_EQ(plan.slot_of_row.elements(), want);
  for (int64_t row = 0; row < static_cast<int64_t>(want.size()); ++row) {
    EXPECT_EQ(plan.row_of_slot.at(want[static_cast<size_t>(row)]), row);
  }
  std::vector<int64_t> offsets(static_cast<size_t>(num_experts) + 1, 0);
  for (int32_t expert : experts.elements()) {
    for (size_t e = static_cast<size_t>(expert) + 1; e < offsets.size(); ++e) ++offsets[e];
  }
  EXPECT_EQ(plan.offsets.elements(), offsets);
  for (int64_t e = 0; e < num_experts; ++e)
    EXPECT_EQ(plan.rows.at(e), plan.offsets.at(e + 1) - plan.offsets.at(e));
  EXPECT_TRUE(plan.offsets.padding_untouched() && plan.rows.padding_untouched() &&
              plan.row_of_slot.padding_untouched() && plan.slot_of_row.padding_untouched());
}

TEST(DispatchPlanTest, IsAStableSortByExpert) {
  TestContext ctx(2);
  struct Case {
    int64_t tokens, top_k, num_experts;
  };
  for (const Case& c : {Case{0, 2, 8}, Case{1, 1, 1}, Case{100, 2, 8}, Case{257, 3, 5}, Case{20, 2, 4096}}) {
    Tensor<int32_t> experts(Shape{c.tokens, c.top_k});
    experts.fill_ids(1, c.num_experts);
    expect_plan(Plan(*ctx, experts, c.num_experts), experts, c.num_experts);
  }
  for (int32_t only : {0, 3, 6}) {
    Tensor<int32_t> experts(Shape{50, 2});
    experts.fill(only);
    expect_plan(Plan(*ctx, experts, 7), experts, 7);
  }
}

TEST(DispatchPlanTest, PadsTheRowsOfAnExpertToTheAlignment) {
  TestContext ctx(2);
  struct Case {
    int64_t tokens, top_k, num_experts, alignment;
  };
  for (const Case& c : {Case{0, 2, 8, 128}, Case{1, 1, 1, 128}, Case{100, 2, 8, 16}, Case{257, 3, 5, 128}}) {
    Tensor<int32_t> experts(Shape{c.tokens, c.top_k});
    experts.fill_ids(1, c.num_experts);
    const Plan plan(*ctx, experts, c.num_experts, c.alignment);
    const Plan dense(*ctx, experts, c.num_experts);
    int64_t begin = 0;
    for (int64_t e = 0; e < c.num_experts; ++e) {
      EXPECT_EQ(plan.offsets.at(e), begin);
      EXPECT_EQ(plan.rows.at(e), dense.rows.at(e));
      for (int64_t r = 0; r < plan.rows.at(e); ++r) {
        const int32_t slot = plan.slot_of_row.at(begin + r);
        EXPECT_EQ(slot, dense.slot_of_row.at(dense.offsets.at(e) + r));
        EXPECT_EQ(plan.row_of_slot.at(slot), begin + r);
      }
      const int64_t end = begin + (plan.rows.at(e) + c.alignment - 1) / c.alignment * c.alignment;
      for (int64_t r = begin + plan.rows.at(e); r < end; ++r) EXPECT_EQ(plan.slot_of_row.at(r), -1);
      begin = end;
    }
    EXPECT_EQ(plan.offsets.at(c.num_experts), begin);
    EXPECT_LE(begin, plan.slot_of_row.size());
    for (int64_t r = begin; r < plan.slot_of_row.size(); ++r) EXPECT_EQ(plan.slot_of_row.at(r), -1);
  }
}

TEST(PermuteTest, GivesRowsWithoutASlotZeros) {
  TestContext ctx(2);
  Tensor<int32_t> experts(Shape{5, 2});
  experts.fill_ids(1, 3);
  const int64_t rows = row_capacity(10, 3, 8);
  Plan plan(*ctx, experts, 3, 8);
  Tensor<float> x(Shape{5, 6}), y(Shape{rows, 6}), values(Shape{5, 2}), y_values(Shape{rows});
  x.fill_normal(2);
  values.fill_normal(3);
  permute(*ctx, {.x_TD = x.view(),
                 .slot_of_row_R = plan.slot_of_row.view(),
                 .y_RD = y.view(),
                 .values_N = values.view(),
                 .y_values_R = y_values.view(),
                 .top_k = 2});
  for (int64_t r = 0; r < rows; ++r) {
    const int32_t slot = plan.slot_of_row.at(r);
    for (int64_t d = 0; d < 6; ++d) EXPECT_EQ(y.at(r, d), slot < 0 ? 0.0f : x.at(slot / 2, d));
    EXPECT_EQ(y_values.at(r), slot < 0 ? 0.0f : values.at(slot / 2, slot % 2));
  }
  y.fill_normal(4);
  Tensor<float> back(Shape{5, 6});
  unpermute(*ctx, {.y_RD = y.view(),
                   .row_of_slot_N = plan.row_of_slot.view(),
                   .x_TD = back.view(),
                   .y_values_R = {},
                   .values_N = {},
                   .top_k = 2});
  for (int64_t t = 0; t < 5; ++t) {
    EXPECT_EQ(back.at(t, 3), y.at(plan.row_of_slot.at(2 * t), 3) + y.at(plan.row_of_slot.at(2 * t + 1), 3));
  }
}

TEST(DispatchPlanTest, RefusesExpertsOutOfRange) {
  TestContext ctx(1);
  for (int32_t bad : {-1, 4}) {
    Tensor<int32_t> experts(Shape{3, 2});
    experts.fill(0).at(2, 1) = bad;
    EXPECT_THROW(Plan(*ctx, experts, 4), Error);
  }
}

struct Sizes {
  int64_t tokens, top_k, num_experts, width;
};

class PermuteTest : public testing::TestWithParam<Sizes> {};

TEST_P(PermuteTest, MovesRowsAndValuesThereAndBack) {
  const auto [tokens, top_k, num_experts, width] = GetParam();
  Tensor<int32_t> experts(Shape{tokens, top_k});
  experts.fill_ids(1, num_experts);
  Tensor<float> x(Shape{tokens, width}, 3), values(Shape{tokens, top_k});
  x.fill_normal(2);
  values.fill_normal(3);
  Tensor<float> first(Shape{tokens, width}, 1);
  for (int threads : {1, 2}) {
    TestContext ctx(threads);
    Plan plan(*ctx, experts, num_experts);
    const auto slots = plan.slot_of_row.elements();
    const auto k = static_cast<size_t>(top_k), columns = static_cast<size_t>(width);
    Tensor<float> y(Shape{tokens * top_k, width}, 2), y_values(Shape{tokens * top_k});
    permute(*ctx, {.x_TD = x.view(),
                   .slot_of_row_R = plan.slot_of_row.view(),
                   .y_RD = y.view(),
                   .values_N = values.view(),
                   .y_values_R = y_values.view(),
                   .top_k = top_k});
    EXPECT_EQ(y.values(), ref::permute(x.values(), slots, k, columns));
    EXPECT_EQ(y_values.values(), ref::permute(values.values(), slots, 1, 1));
    EXPECT_TRUE(y.padding_untouched() && y_values.padding_untouched());

    y.fill_normal(4);  // as expert outputs: the rows of a token differ
    Tensor<float> back(Shape{tokens, width}, 1), values_back(Shape{tokens, top_k});
    UnpermuteArgs args{.y_RD = y.view(),
                       .row_of_slot_N = plan.row_of_slot.view(),
                       .x_TD = back.view(),
                       .y_values_R = y_values.view(),
                       .values_N = values_back.view(),
                       .top_k = top_k};
    unpermute(*ctx, args);
    const auto sums = ref::unpermute(y.values(), slots, k, columns);
    EXPECT_CLOSE(back.values(), sums, DType::kF32);
    EXPECT_TRUE(values_back.same_bits(values));
    EXPECT_TRUE(back.padding_untouched());
    Tensor<float> added = x;
    args.x_TD = added.view();
    args.accumulate = true;
    args.y_values_R = args.values_N = TensorView();
    unpermute(*ctx, args);
    EXPECT_CLOSE(added.values(), sum_of(x.values(), sums), DType::kF32);
    if (threads == 1) first = back;
    EXPECT_TRUE(back.same_bits(first));
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, PermuteTest,
                         testing::Values(Sizes{0, 2, 8, 16}, Sizes{1, 1, 1, 1}, Sizes{37, 1, 3, 15},
                                         Sizes{300, 2, 8, 33}, Sizes{40, 3, 64, 16}, Sizes{21, 4, 2, 17}));

TEST(UnpermuteTest, SumsTheSlotsOfATokenInOrder) {
  TestContext ctx(1);
  Tensor<float> y(Shape{4, 1}), x(Shape{1, 1});
  Tensor<int32_t> rows(Shape{4});
  // In order of slot: 1e8 + 3 = 1e8, + 3 = 1e8, - 1e8 = 0. Any other order leaves something.
  y.set({-1e8, 3.0, 1e8, 3.0});
  rows.set({2, 1, 3, 0});
  UnpermuteArgs args{.y_RD = y.view(),
                     .row_of_slot_N = rows.view(),
                     .x_TD = x.view(),
                     .y_values_R = {},
                     .values_N = {},
                     .top_k = 4};
  unpermute(*ctx, args);
  EXPECT_EQ(x.at(0), 0.0f);
  x.fill(5);
  args.accumulate = true;
  unpermute(*ctx, args);
  EXPECT_EQ(x.at(0), 8.0f);  // 5 + 1e8 = 1e8 + 8 (8 apart there), and 3 twice vanishes
}

TEST(PermuteTest, RefusesIndicesOutOfRangeAndWrongShapes) {
  TestContext ctx(1);
  Tensor<float> x(Shape{2, 3}), y(Shape{4, 3}), short_y(Shape{3, 3});
  Tensor<int32_t> index(Shape{4});
  x.fill(0);
  y.fill(0);
  for (int32_t bad : {-2, 4}) {
    index.fill(0).at(3) = bad;
    EXPECT_THROW(permute(*ctx, {.x_TD = x.view(),
                                .slot_of_row_R = index.view(),
                                .y_RD = y.view(),
                                .values_N = {},
                                .y_values_R = {},
                                .top_k = 2}),
                 Error);
    EXPECT_THROW(unpermute(*ctx, {.y_RD = y.view(),
                                  .row_of_slot_N = index.view(),
                                  .x_TD = x.view(),
                                  .y_values_R = {},
                                  .values_N = {},
                                  .top_k = 2}),
                 Error);
  }
  index.fill(0);
  EXPECT_THROW(permute(*ctx, {.x_TD = x.view(),
                              .slot_of_row_R = index.view(),
                              .y_RD = short_y.view(),
                              .values_N = {},
                              .y_values_R = {},
                              .top_k = 2}),
               Error);
}

// Backward of permute is unpermute and the reverse: <permute(x), y> = <x, unpermute(y)>, by differences.
TEST(DispatchReferenceTest, GradientIsThatOfFiniteDifferences) {
  const std::vector<int32_t> slots = ref::slots_by_expert({1, 0, 2, 1, 0, 2});
  Tensor<double> x(Shape{3, 2}), dy(Shape{6, 2});
  x.fill_normal(1);
  dy.fill_normal(2);
  const auto loss = [&](const ref::Vector& v) { return ref::dot(ref::permute(v, slots, 2, 2), dy.values()); };
  EXPECT_LE(ref::gradient_error(loss, x.values(), ref::unpermute(dy.values(), slots, 2, 2)),
            ref::kGradientTolerance);
}

}  // namespace
}  // namespace biomoe::test
