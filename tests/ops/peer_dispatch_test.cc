#include "biomoe/ops/peer_dispatch.h"

#include "biomoe/ops/dispatch.h"
#include "tests/ops/op_test.h"
#include "tests/ops/peer_dispatch_cases.h"

namespace biomoe::test {
namespace {

// A rank's tensors.
struct PeerRank {
  Tensor<int32_t> experts, row_of_slot, slot_of_row, own_rows, rows;
  Tensor<int64_t> begins, offsets;
  Tensor<float> x, y, values, y_values, back, values_back;

  PeerRank(const PeerCase& c, const PeerReference& want, int64_t rank)
      : experts(Shape{c.tokens[static_cast<size_t>(rank)], c.top_k}),
        row_of_slot(Shape{experts.size()}),
        slot_of_row(Shape{experts.size()}),
        own_rows(Shape{c.experts}),
        rows(Shape{c.experts / c.ranks}),
        begins(Shape{c.experts + 1}),
        offsets(Shape{c.experts / c.ranks + 1}),
        x(Shape{experts.shape()[0], c.width}, 3),
        y(Shape{want.capacity, c.width}, 3),
        values(Shape{experts.size()}),
        y_values(Shape{want.capacity}),
        back(Shape{experts.shape()[0], c.width}, 3),
        values_back(Shape{experts.size()}) {
    const auto& of_slot = want.experts[static_cast<size_t>(rank)];
    experts.set({of_slot.begin(), of_slot.end()});
    x.fill_normal(static_cast<uint64_t>(rank) + 1);
    values.fill_normal(static_cast<uint64_t>(rank) + 100);
  }
};

class PeerDispatchTest : public testing::TestWithParam<PeerCase> {
 protected:
  PeerDispatchTest() : want_(GetParam()), counts_(Shape{GetParam().ranks, GetParam().experts}) {
    const PeerCase& c = GetParam();
    ranks_.reserve(static_cast<size_t>(c.ranks));
    for (int64_t rank = 0; rank < c.ranks; ++rank) ranks_.emplace_back(c, want_, rank);
    counts_.set({want_.counts.begin(), want_.counts.end()});
    for (PeerRank& rank : ranks_) {
      y_.push_back(rank.y.view());
      y_values_.push_back(rank.y_values.view());
    }
  }
  void plan(int64_t number) {
    const PeerCase& c = GetParam();
    PeerRank& rank = ranks_[static_cast<size_t>(number)];
    dispatch_plan(*ctx_, {.experts_Tk = rank.experts.view(),
                          .offsets_E1 = rank.begins.view(),
                          .rows_E = rank.own_rows.view(),
                          .row_of_slot_N = rank.row_of_slot.view(),
                          .slot_of_row_R = rank.slot_of_row.view()});
    peer_plan(*ctx_, {.experts_Tk = rank.experts.view(),
                      .begins_E1 = rank.begins.view(),
                      .counts_PE = counts_.view(),
                      .rank = number,
                      .row_alignment = c.alignment,
                      .row_of_slot_N = rank.row_of_slot.view(),
                      .offsets_E1 = rank.offsets.view(),
                      .rows_E = rank.rows.view()});
  }
  int64_t held() const { return GetParam().experts / GetParam().ranks; }

  TestContext ctx_{2};
  PeerReference want_;
  Tensor<int32_t> counts_;
  std::vector<PeerRank> ranks_;
  std::vector<TensorView> y_, y_values_;
};

TEST_P(PeerDispatchTest, RowsArriveInTheOrderOfExpertAndRankAndComeBack) {
  const PeerCase& c = GetParam();
  for (int64_t p = 0; p < c.ranks; ++p) {
    plan(p);
    const auto at = static_cast<size_t>(p);
    EXPECT_EQ(ranks_[at].row_of_slot.elements(), want_.row_of_slot[at]);
    EXPECT_EQ(ranks_[at].offsets.elements(), want_.offsets[at]);
    EXPECT_EQ(ranks_[at].rows.elements(), want_.rows[at]);
  }
  for (PeerRank& rank : ranks_) {
    send_rows(*ctx_, {.x_TD = rank.x.view(),
                      .experts_Tk = rank.experts.view(),
                      .row_of_slot_N = rank.row_of_slot.view(),
                      .y_PRD = y_,
                      .values_N = rank.values.view(),
                      .y_values_PR = y_values_,
                      .held_experts = held()});
  }
  for (PeerRank& rank : ranks_) {
    zero_padding(*ctx_, {.x_RD = rank.y.view(),
                         .values_R = rank.y_values.view(),
                         .offsets_E1 = rank.offsets.view(),
                         .rows_E = rank.rows.view()});
    for (int64_t e = 0; e < held(); ++e) {
      for (int64_t row = rank.offsets.at(e) + rank.rows.at(e); row < rank.offsets.at(e + 1); ++row) {
        EXPECT_EQ(rank.y_values.at(row), 0.0f);
        for (int64_t i = 0; i < c.width; ++i) ASSERT_EQ(rank.y.at(row, i), 0.0f);
      }
    }
    EXPECT_TRUE(rank.y.padding_untouched() && rank.y_values.padding_untouched());
  }
  for (PeerRank& rank : ranks_) {
    fetch_rows(*ctx_, {.y_PRD = y_,
                       .experts_Tk = rank.experts.view(),
                       .row_of_slot_N = rank.row_of_slot.view(),
                       .x_TD = rank.back.view(),
                       .y_values_PR = y_values_,
                       .values_N = rank.values_back.view(),
                       .held_experts = held()});
    EXPECT_EQ(rank.values_back.elements(), rank.values.elements());
    for (int64_t t = 0; t < rank.x.shape()[0]; ++t) {
      for (int64_t i = 0; i < c.width; ++i) {
        float sum = rank.x.at(t, i);  // as many of the same, added in turn
        for (int64_t j = 1; j < c.top_k; ++j) sum += rank.x.at(t, i);
        ASSERT_EQ(rank.back.at(t, i), sum) << t << " " << i;
      }
    }
  }
}

TEST_P(PeerDispatchTest, EachRowIsThatOfItsSlot) {
  const PeerCase& c = GetParam();
  for (int64_t p = 0; p < c.ranks; ++p) plan(p);
  for (PeerRank& rank : ranks_) {
    send_rows(*ctx_, {.x_TD = rank.x.view(),
                      .experts_Tk = rank.experts.view(),
                      .row_of_slot_N = rank.row_of_slot.view(),
                      .y_PRD = y_,
                      .held_experts = held()});
  }
  for (const PeerRank& rank : ranks_) {
    for (int64_t s = 0; s < rank.experts.size(); ++s) {
      const PeerRank& home = ranks_[static_cast<size_t>(rank.experts.at(s / c.top_k, s % c.top_k) / held())];
      for (int64_t i = 0; i < c.width; ++i)
        ASSERT_EQ(home.y.at(rank.row_of_slot.at(s), i), rank.x.at(s / c.top_k, i));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, PeerDispatchTest, testing::ValuesIn(peer_cases()));

TEST(PeerDispatchErrors, AreNamed) {
  TestContext ctx(1);
  Tensor<int32_t> counts(Shape{2, 5}), experts(Shape{1, 1}), row(Shape{1}), rows(Shape{2});
  Tensor<int64_t> begins(Shape{6}), offsets(Shape{3});
  EXPECT_THROW(peer_plan(*ctx, {.experts_Tk = experts.view(),
                                .begins_E1 = begins.view(),
                                .counts_PE = counts.view(),
                                .row_of_slot_N = row.view(),
                                .offsets_E1 = offsets.view(),
                                .rows_E = rows.view()}),
               Error);
}

}  // namespace
}  // namespace biomoe::test
