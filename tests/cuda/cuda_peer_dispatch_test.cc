// Ranks of one process on one GPU, against what the plain way works out on the host.
#include "biomoe/ops/dispatch.h"
#include "biomoe/ops/peer_dispatch.h"
#include "tests/cuda/gpu_test.h"
#include "tests/ops/peer_dispatch_cases.h"

namespace biomoe::test {
namespace {

struct PeerRank {
  GpuTensor experts, row_of_slot, slot_of_row, own_rows, rows, begins, offsets, x, y, values, y_values, back,
      values_back;

  PeerRank(Context& ctx, DType dtype, const PeerCase& c, const PeerReference& want, int64_t rank)
      : PeerRank(ctx, dtype, c, want.capacity, c.tokens[static_cast<size_t>(rank)]) {
    experts.set(doubles(want.experts[static_cast<size_t>(rank)]));
    x.set(normals(static_cast<uint64_t>(rank) + 1, x.view().num_elements(), dtype));
    values.set(normals(static_cast<uint64_t>(rank) + 100, values.view().num_elements(), DType::kF32));
  }

 private:
  PeerRank(Context& ctx, DType dtype, const PeerCase& c, int64_t capacity, int64_t tokens)
      : experts(ctx, DType::kI32, Shape{tokens, c.top_k}),
        row_of_slot(ctx, DType::kI32, Shape{tokens * c.top_k}),
        slot_of_row(ctx, DType::kI32, Shape{tokens * c.top_k}),
        own_rows(ctx, DType::kI32, Shape{c.experts}),
        rows(ctx, DType::kI32, Shape{c.experts / c.ranks}),
        begins(ctx, DType::kI64, Shape{c.experts + 1}),
        offsets(ctx, DType::kI64, Shape{c.experts / c.ranks + 1}),
        x(ctx, dtype, Shape{tokens, c.width}),
        y(ctx, dtype, Shape{capacity, c.width}),
        values(ctx, DType::kF32, Shape{tokens * c.top_k}),
        y_values(ctx, DType::kF32, Shape{capacity}),
        back(ctx, dtype, Shape{tokens, c.width}),
        values_back(ctx, DType::kF32, Shape{tokens * c.top_k}) {}
};

class CudaPeerDispatchTest : public GpuTest {
 protected:
  void expect_round_trip(DType dtype, const PeerCase& c) {
    SCOPED_TRACE(
        fmt::format("{}: {} ranks, {} experts, width {}", dtype_name(dtype), c.ranks, c.experts, c.width));
    const PeerReference want(c);
    const int64_t held = c.experts / c.ranks;
    GpuTensor counts(ctx(), DType::kI32, Shape{c.ranks, c.experts});
    counts.set(doubles(want.counts));
    std::vector<std::unique_ptr<PeerRank>> ranks;
    std::vector<TensorView> y, y_values;
    for (int64_t p = 0; p < c.ranks; ++p) {
      ranks.push_back(std::make_unique<PeerRank>(ctx(), dtype, c, want, p));
      y.push_back(ranks.back()->y.view());
      y_values.push_back(ranks.back()->y_values.view());
    }
    for (int64_t p = 0; p < c.ranks; ++p) {
      PeerRank& rank = *ranks[static_cast<size_t>(p)];
      const int64_t slots = rank.experts.view().num_elements();
      dispatch_plan(with_scratch(dispatch_plan_scratch_bytes(Device::kCuda, slots, c.experts)),
                    {.experts_Tk = rank.experts.view(),
                     .offsets_E1 = rank.begins.view(),
                     .rows_E = rank.own_rows.view(),
                     .row_of_slot_N = rank.row_of_slot.view(),
                     .slot_of_row_R = rank.slot_of_row.view()});
      peer_plan(ctx(), {.experts_Tk = rank.experts.view(),
                        .begins_E1 = rank.begins.view(),
                        .counts_PE = counts.view(),
                        .rank = p,
                        .row_alignment = c.alignment,
                        .row_of_slot_N = rank.row_of_slot.view(),
                        .offsets_E1 = rank.offsets.view(),
                        .rows_E = rank.rows.view()});
      EXPECT_EQ(rank.row_of_slot.values(), doubles(want.row_of_slot[static_cast<size_t>(p)]));
      EXPECT_EQ(rank.rows.values(), doubles(want.rows[static_cast<size_t>(p)]));
      const auto& offsets = want.offsets[static_cast<size_t>(p)];
      EXPECT_EQ(rank.offsets.values(), std::vector<double>(offsets.begin(), offsets.end()));
      send_rows(ctx(), {.x_TD = rank.x.view(),
                        .experts_Tk = rank.experts.view(),
                        .row_of_slot_N = rank.row_of_slot.view(),
                        .y_PRD = y,
                        .values_N = rank.values.view(),
                        .y_values_PR = y_values,
                        .held_experts = held});
    }
    for (const auto& rank : ranks) {
      zero_padding(ctx(), {.x_RD = rank->y.view(),
                           .values_R = rank->y_values.view(),
                           .offsets_E1 = rank->offsets.view(),
                           .rows_E = rank->rows.view()});
    }
    for (int64_t p = 0; p < c.ranks; ++p) expect_rows(*ranks[static_cast<size_t>(p)], ranks, want, p, c);
    for (const auto& rank : ranks) {
      fetch_rows(ctx(), {.y_PRD = y,
                         .experts_Tk = rank->experts.view(),
                         .row_of_slot_N = rank->row_of_slot.view(),
                         .x_TD = rank->back.view(),
                         .y_values_PR = y_values,
                         .values_N = rank->values_back.view(),
                         .held_experts = held});
      EXPECT_EQ(rank->values_back.values(), rank->values.values());
      std::vector<double> sums = rank->x.values();
      for (double& value : sums) {
        value *= static_cast<double>(c.top_k);  // exact but for rounding to the type
      }
      EXPECT_LE(unit_error(rank->back.values(), sums), tolerance(dtype));
    }
  }

  // Rows that were sent by rank p are at their places; padding is zero.
  void expect_rows(PeerRank& rank, const std::vector<std::unique_ptr<PeerRank>>& ranks,
                   const PeerReference& want, int64_t p, const PeerCase& c) {
    const auto& experts = want.experts[static_cast<size_t>(p)];
    const std::vector<double> x = rank.x.values();
    std::vector<std::vector<double>> y;
    for (const auto& home : ranks) y.push_back(home->y.values());
    const auto width = static_cast<size_t>(c.width);
    for (size_t s = 0; s < experts.size(); ++s) {
      const auto home = static_cast<size_t>(experts[s] / (c.experts / c.ranks));
      const auto row = static_cast<size_t>(want.row_of_slot[static_cast<size_t>(p)][s]);
      const size_t token = s / static_cast<size_t>(c.top_k);
      for (size_t i = 0; i < width; ++i) ASSERT_EQ(y[home][row * width + i], x[token * width + i]);
    }
    const auto& offsets = want.offsets[static_cast<size_t>(p)];
    for (size_t e = 0; e + 1 < offsets.size(); ++e) {
      const int64_t end = offsets[e] + want.rows[static_cast<size_t>(p)][e];
      for (auto row = static_cast<size_t>(end); row < static_cast<size_t>(offsets[e + 1]); ++row) {
        for (size_t i = 0; i < width; ++i) ASSERT_EQ(y[static_cast<size_t>(p)][row * width + i], 0.0);
      }
    }
    EXPECT_TRUE(rank.y.padding_untouched() && rank.y_values.padding_untouched());
  }
};

TEST_F(CudaPeerDispatchTest, RowsArriveInTheOrderOfExpertAndRankAndComeBack) {
  for (const DType dtype : kComputeTypes) {
    for (const PeerCase& c : peer_cases()) expect_round_trip(dtype, c);
  }
}

}  // namespace
}  // namespace biomoe::test
