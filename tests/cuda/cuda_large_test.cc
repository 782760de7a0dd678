// Tensors of more than 2^31 elements: 530,000 rows of 4096 or more, compared at their ends and around element
// 2^31. Skipped, with the reason, where the GPU has not the memory.
#include <numeric>
#include <optional>

#include "biomoe/ops/adamw.h"
#include "biomoe/ops/cuda_sizes.h"
#include "biomoe/ops/dispatch.h"
#include "biomoe/ops/fill.h"
#include "biomoe/ops/gemm.h"
#include "biomoe/ops/grouped_gemm.h"
#include "biomoe/ops/rms_norm.h"
#include "biomoe/ops/rope.h"
#include "biomoe/ops/scaled_swiglu.h"
#include "tests/cuda/gpu_large.h"
#include "tests/ref/adamw.h"
#include "tests/ref/rms_norm.h"
#include "tests/ref/rope.h"
#include "tests/ref/scaled_swiglu.h"

namespace biomoe::test {
namespace {

using CudaLargeTest = GpuTest;

TEST_F(CudaLargeTest, NormsOfRowsBeyond2To31Elements) {
  BIOMOE_REQUIRE_GPU_MEMORY(28);
  const Shape shape{kRows, kWidth};
  Large x(ctx(), DType::kBF16, shape), residual(ctx(), DType::kBF16, shape), sum(ctx(), DType::kBF16, shape),
      y(ctx(), DType::kBF16, shape), dx(ctx(), DType::kBF16, shape);
  const Table table(ctx(), 1, kWidth), other(ctx(), 2, kWidth);
  Filler first(ctx(), 3, kRows), second(ctx(), 4, kRows);
  first.fill(table, x.view());
  second.fill(other, residual.view());
  EXPECT_EQ(x.rows(kSpots), first.rows(table, kSpots));

  GpuTensor weight(ctx(), DType::kBF16, Shape{kWidth}), dweight(ctx(), DType::kF32, Shape{kWidth}),
      rstd(ctx(), DType::kF32, Shape{kRows});
  const Values weight_values = normals(5, kWidth, DType::kBF16);
  weight.set(weight_values);
  Context& scratch = with_scratch(rms_norm_backward_scratch_bytes(Device::kCuda, kRows, kWidth));
  rms_norm_forward(scratch, {.x_TD = x.view(),
                             .residual_TD = residual.view(),
                             .weight_D = weight.view(),
                             .sum_TD = sum.view(),
                             .y_TD = y.view(),
                             .rstd_T = rstd.view(),
                             .eps = 1e-5});
  rms_norm_backward(scratch, {.dy_TD = residual.view(),
                              .sum_TD = sum.view(),
                              .weight_D = weight.view(),
                              .rstd_T = rstd.view(),
                              .dresidual_TD = {},
                              .dx_TD = dx.view(),
                              .dweight_D = dweight.view()});
  Values want_sum = first.rows(table, kSpots);
  const Values dy = second.rows(other, kSpots);
  for (size_t i = 0; i < want_sum.size(); ++i) want_sum[i] += dy[i];
  EXPECT_CLOSE(sum.rows(kSpots), want_sum, DType::kBF16);
  EXPECT_CLOSE(y.rows(kSpots), ref::rms_norm(want_sum, weight_values, 1e-5).y, DType::kBF16);
  const Values held = sum.rows(kSpots);
  EXPECT_CLOSE(dx.rows(kSpots), ref::rms_norm_backward(dy, held, weight_values, 1e-5).dsum, DType::kBF16);
  for (const double value : dweight.values()) ASSERT_TRUE(std::isfinite(value));

  GpuTensor count(ctx(), DType::kI64, Shape{1});
  count_nonfinite(ctx(), {.x = y.view(), .count_1 = count.view()});
  EXPECT_EQ(count.values()[0], 0);
  fill_zero(ctx(), {.x = dx.view()});
  EXPECT_EQ(dx.rows(kSpots), Values(kSpots.size() * kWidth, 0.0));
}

TEST_F(CudaLargeTest, RotationOfRowsBeyond2To31Elements) {
  BIOMOE_REQUIRE_GPU_MEMORY(8);
  Large x(ctx(), DType::kBF16, {kRows, kWidth});
  const Table table(ctx(), 1, kWidth);
  Filler first(ctx(), 3, kRows);
  first.fill(table, x.view());
  constexpr int64_t kHeads = 32, kHead = 128, kPositions = 1000;
  Tensor<float> cosines(Shape{kPositions, kHead / 2}), sines(Shape{kPositions, kHead / 2});
  fill_rope_tables(1e4, kHead, cosines.view(), sines.view());
  GpuTensor cos(ctx(), DType::kF32, Shape{kPositions, kHead / 2}),
      sin(ctx(), DType::kF32, Shape{kPositions, kHead / 2}), positions(ctx(), DType::kI32, Shape{kRows});
  cos.set(cosines.values());
  sin.set(sines.values());
  const auto places = ids(6, kRows, kPositions);
  positions.set(doubles(places));
  rope(ctx(), {.x_TC = x.view(),
               .positions_T = positions.view(),
               .cos_SK2 = cos.view(),
               .sin_SK2 = sin.view(),
               .num_heads = kHeads,
               .head_dim = kHead});
  std::vector<int32_t> spot_places;
  for (const int64_t spot : kSpots) spot_places.push_back(places[static_cast<size_t>(spot)]);
  const ref::RopeShape rotated{static_cast<int64_t>(kSpots.size()), kWidth, kHeads, kHead};
  EXPECT_CLOSE(x.rows(kSpots), ref::rope(first.rows(table, kSpots), spot_places, 1e4, rotated), DType::kBF16);
}

TEST_F(CudaLargeTest, DenseProductsOfRowsBeyond2To31Elements) {
  BIOMOE_REQUIRE_GPU_MEMORY(8);
  constexpr int64_t kOut = 64;
  Large x(ctx(), DType::kBF16, {kRows, kWidth}), y(ctx(), DType::kBF16, {kRows, kOut});
  const Table table(ctx(), 1, kWidth), weights(ctx(), 2, kWidth, 0.02);
  Filler first(ctx(), 3, kRows);
  first.fill(table, x.view());
  const TensorView w = weights.tensor.view().rows(0, kOut);
  gemm(ctx(), {.a = x.view(), .b = w, .c = y.view(), .transpose_b = true});
  Values want;
  for (const int64_t spot : kSpots) {
    const Values row = first.row(table, spot);
    for (int32_t o = 0; o < kOut; ++o) {
      const Values column = weights.row(o);
      want.push_back(std::inner_product(row.begin(), row.end(), column.begin(), 0.0));
    }
  }
  EXPECT_CLOSE(y.rows(kSpots), want, DType::kBF16);
}

TEST_F(CudaLargeTest, SwigluOfRowsBeyond2To32Elements) {
  BIOMOE_REQUIRE_GPU_MEMORY(24);
  constexpr int64_t kBlock = cuda::kGateUpInterleave;
  Large gate_up(ctx(), DType::kBF16, {kRows, 2 * kWidth}), act(ctx(), DType::kBF16, {kRows, kWidth});
  const Table table(ctx(), 1, 2 * kWidth), gradients(ctx(), 2, kWidth);
  Filler first(ctx(), 3, kRows), second(ctx(), 4, kRows);
  first.fill(table, gate_up.view());
  GpuTensor probs(ctx(), DType::kF32, Shape{kRows}), dprobs(ctx(), DType::kF32, Shape{kRows});
  const Values prob_values = normals(5, kRows, DType::kF32);
  probs.set(prob_values);
  scaled_swiglu_forward(
      ctx(),
      {.gate_up_R2F = gate_up.view(), .probs_R = probs.view(), .act_RF = act.view(), .interleave = kBlock});
  // Gate columns first, as the reference has them.
  Values apart, prob_spots;
  for (const int64_t spot : kSpots) {
    const Values row = first.row(table, spot);
    for (const int64_t half : {int64_t{0}, kBlock}) {
      for (int64_t f = 0; f < kWidth; ++f) {
        apart.push_back(row[static_cast<size_t>(2 * kBlock * (f / kBlock) + half + f % kBlock)]);
      }
    }
    prob_spots.push_back(prob_values[static_cast<size_t>(spot)]);
  }
  EXPECT_CLOSE(act.rows(kSpots), ref::scaled_swiglu(apart, prob_spots, kWidth), DType::kBF16);
  second.fill(gradients, act.view());
  scaled_swiglu_backward(ctx(), {.dact_RF = act.view(),
                                 .gate_up_R2F = gate_up.view(),
                                 .probs_R = probs.view(),
                                 .dgate_up_R2F = gate_up.view(),
                                 .dprobs_R = dprobs.view(),
                                 .interleave = kBlock});
  const auto want = ref::scaled_swiglu_backward(second.rows(gradients, kSpots), apart, prob_spots, kWidth);
  Values got, got_dprobs;
  const Values all_dprobs = dprobs.values();
  for (const int64_t spot : kSpots) {
    const Values row = gate_up.row(spot);
    for (const int64_t half : {int64_t{0}, kBlock}) {
      for (int64_t f = 0; f < kWidth; ++f) {
        got.push_back(row[static_cast<size_t>(2 * kBlock * (f / kBlock) + half + f % kBlock)]);
      }
    }
    got_dprobs.push_back(all_dprobs[static_cast<size_t>(spot)]);
  }
  EXPECT_CLOSE(got, want.dgate_up, DType::kBF16);
  EXPECT_CLOSE(got_dprobs, want.dprobs, DType::kBF16);
}

TEST_F(CudaLargeTest, UpdatesOfArenasBeyond2To31Elements) {
  BIOMOE_REQUIRE_GPU_MEMORY(26);
  constexpr int64_t kElements = kRows * kWidth;
  const Shape rows{kRows, kWidth}, flat{kElements};
  Large weights(ctx(), DType::kBF16, rows), remainders(ctx(), DType::kU16, rows),
      grad(ctx(), DType::kBF16, rows), exp_avg(ctx(), DType::kBF16, rows),
      exp_avg_sq(ctx(), DType::kBF16, rows);
  const Table table(ctx(), 1, kWidth), gradients(ctx(), 2, kWidth);
  Filler first(ctx(), 3, kRows), second(ctx(), 4, kRows);
  first.fill(table, weights.view());
  second.fill(gradients, grad.view());
  for (const Large* cleared : {&remainders, &exp_avg, &exp_avg_sq}) fill_zero(ctx(), {.x = cleared->view()});
  const std::vector<ArenaSegment> segments = {{0, kElements - kWidth, true},
                                              {kElements - kWidth, kWidth, true}};
  GpuTensor sums(ctx(), DType::kF64, Shape{2}), update(ctx(), DType::kF64, Shape{kNumUpdateValues});
  constexpr ref::AdamwRule kRule{.lr = 3e-2, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-6, .weight_decay = 0.1};
  Values numbers(kNumUpdateValues, 1.0);
  numbers[kLr] = kRule.lr;
  numbers[kCorrection1] = 1.0 - kRule.beta1;
  numbers[kCorrection2] = 1.0 - kRule.beta2;
  update.set(numbers);
  sum_squares(with_scratch(sum_squares_scratch_bytes(Device::kCuda, segments)),
              {.x_A = grad.as(flat), .segments = segments, .sums_S = sums.view()});
  adamw(ctx(), {.weights_A = weights.as(flat),
                .remainder_A = remainders.as(flat),
                .grad_A = grad.as(flat),
                .exp_avg_A = exp_avg.as(flat),
                .exp_avg_sq_A = exp_avg_sq.as(flat),
                .segments = segments,
                .beta1 = kRule.beta1,
                .beta2 = kRule.beta2,
                .eps = kRule.eps,
                .weight_decay = kRule.weight_decay,
                .update_5 = update.view()});
  Values squares(kTableRows);
  for (int32_t id = 0; id < kTableRows; ++id) {
    const Values row = gradients.row(id);
    squares[static_cast<size_t>(id)] = std::inner_product(row.begin(), row.end(), row.begin(), 0.0);
  }
  Values want_sums(2);
  for (int64_t t = 0; t < kRows; ++t) {
    want_sums[t + 1 == kRows ? 1 : 0] += squares[static_cast<size_t>(second.tokens[static_cast<size_t>(t)])];
  }
  const Values got_sums = sums.values();
  for (size_t i = 0; i < 2; ++i) EXPECT_NEAR(got_sums[i], want_sums[i], 1e-9 * want_sums[i]);
  Values want, masters;
  for (const int64_t spot : kSpots) {
    const Values params = first.row(table, spot), gradient = second.row(gradients, spot);
    const Values high = weights.row(spot), low = remainders.row(spot);
    for (size_t i = 0; i < params.size(); ++i) {
      want.push_back(ref::adamw({.param = params[i]}, gradient[i], kRule, 1).param);
      masters.push_back(static_cast<double>(
          join_master(bf16_from_float(static_cast<float>(high[i])), static_cast<uint16_t>(low[i]))));
    }
  }
  EXPECT_CLOSE(masters, want, DType::kF32);
}

// Rows of experts on their way there, through the products, and back.
class CudaLargeExpertsTest : public GpuTest {
 protected:
  static constexpr int64_t kExperts = 8, kTopK = 2, kSlots = kRows * kTopK;
  static constexpr int64_t kCapacity = row_capacity(kSlots, kExperts, cuda::kExpertRowAlignment);

  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    BIOMOE_REQUIRE_GPU_MEMORY(40);
    experts_ = ids(7, kSlots, kExperts);
    // The second choice is another expert than the first.
    for (size_t slot = 1; slot < experts_.size(); slot += 2) {
      if (experts_[slot] == experts_[slot - 1])
        experts_[slot] = (experts_[slot] + 1) % static_cast<int32_t>(kExperts);
    }
    expert_.emplace(ctx(), DType::kI32, Shape{kRows, kTopK});
    offsets_.emplace(ctx(), DType::kI64, Shape{kExperts + 1});
    rows_.emplace(ctx(), DType::kI32, Shape{kExperts});
    row_of_slot_.emplace(ctx(), DType::kI32, Shape{kSlots});
    slot_of_row_.emplace(ctx(), DType::kI32, Shape{kCapacity});
    expert_->set(doubles(experts_));
    dispatch_plan(with_scratch(dispatch_plan_scratch_bytes(Device::kCuda, kSlots, kExperts)),
                  {.experts_Tk = expert_->view(),
                   .offsets_E1 = offsets_->view(),
                   .rows_E = rows_->view(),
                   .row_of_slot_N = row_of_slot_->view(),
                   .slot_of_row_R = slot_of_row_->view(),
                   .row_alignment = cuda::kExpertRowAlignment});
    for (const double offset : offsets_->values()) ends_.push_back(static_cast<int64_t>(offset));
    for (const double count : rows_->values()) counts_.push_back(static_cast<int64_t>(count));
    slots_ = slot_of_row_->values();
    for (size_t e = 0; e < kExperts; ++e) {
      spots_.push_back(ends_[e]);
      spots_.push_back(ends_[e] + counts_[e] - 1);
    }
    for (const int64_t row : {int64_t{524287}, int64_t{524288}, int64_t{1048576 - 1}, int64_t{1048576}}) {
      if (slots_[static_cast<size_t>(row)] >= 0) spots_.push_back(row);
    }
  }

  // Stable within each expert, and every slot in its expert's rows once.
  void expect_plan() {
    ASSERT_EQ(std::accumulate(counts_.begin(), counts_.end(), int64_t{0}), kSlots);
    std::vector<int64_t> next(ends_.begin(), ends_.end() - 1);
    const Values row_of_slot = row_of_slot_->values();
    for (size_t slot = 0; slot < experts_.size(); ++slot) {
      const int64_t row = next[static_cast<size_t>(experts_[slot])]++;
      ASSERT_EQ(row_of_slot[slot], static_cast<double>(row)) << slot;
      ASSERT_EQ(slots_[static_cast<size_t>(row)], static_cast<double>(slot)) << row;
    }
  }
  void to_experts(const Large& x, const Large& rows) {
    permute(ctx(), {.x_TD = x.view(),
                    .slot_of_row_R = slot_of_row_->view(),
                    .y_RD = rows.view(),
                    .values_N = {},
                    .y_values_R = {},
                    .top_k = kTopK});
  }
  int64_t token_of(int64_t row) const {
    return static_cast<int64_t>(slots_[static_cast<size_t>(row)]) / kTopK;
  }
  size_t expert_of(int64_t row) const {
    return static_cast<size_t>(std::upper_bound(ends_.begin(), ends_.end(), row) - ends_.begin() - 1);
  }

  std::vector<int32_t> experts_;
  std::optional<GpuTensor> expert_, offsets_, rows_, row_of_slot_, slot_of_row_;
  std::vector<int64_t> ends_, counts_, spots_;
  Values slots_;
};

TEST_F(CudaLargeExpertsTest, RowsGoToTheirExpertsAndBack) {
  expect_plan();
  Large x(ctx(), DType::kBF16, {kRows, kWidth}), rows(ctx(), DType::kBF16, {kCapacity, kWidth});
  const Table table(ctx(), 1, kWidth);
  Filler first(ctx(), 3, kRows);
  first.fill(table, x.view());
  to_experts(x, rows);
  for (const int64_t row : spots_) {
    ASSERT_EQ(rows.row(row), first.row(table, token_of(row))) << row;
  }
  for (int64_t row = ends_.back(); row < kCapacity; ++row)
    ASSERT_EQ(rows.row(row), Values(kWidth, 0.0)) << row;
  unpermute(ctx(), {.y_RD = rows.view(),
                    .row_of_slot_N = row_of_slot_->view(),
                    .x_TD = x.view(),
                    .y_values_R = {},
                    .values_N = {},
                    .top_k = kTopK});
  Values want = first.rows(table, kSpots);
  for (double& value : want) value *= 2;
  EXPECT_EQ(x.rows(kSpots), want);
}

TEST_F(CudaLargeExpertsTest, GroupedProductsOfRowsBeyond2To32Elements) {
  if (device_info(Device::kCuda).compute_capability != 90) {
    GTEST_SKIP() << "grouped products need compute capability 9.0";
  }
  Large x(ctx(), DType::kBF16, {kRows, kWidth}), rows(ctx(), DType::kBF16, {kCapacity, kWidth}),
      y(ctx(), DType::kBF16, {kCapacity, kWidth}), gradients(ctx(), DType::kBF16, {kCapacity, kWidth}),
      w(ctx(), DType::kBF16, {kExperts, kWidth, kWidth}), dw(ctx(), DType::kF32, {kExperts, kWidth, kWidth});
  const Table table(ctx(), 1, kWidth), other(ctx(), 2, kWidth), weights(ctx(), 3, kWidth, 0.02);
  Filler first(ctx(), 4, kRows), second(ctx(), 5, kRows), of_weights(ctx(), 6, kExperts * kWidth);
  of_weights.fill(weights, w.as({kExperts * kWidth, kWidth}));
  second.fill(other, x.view());
  to_experts(x, gradients);
  first.fill(table, x.view());
  to_experts(x, rows);
  GroupedGemmArgs args{.x_RI = rows.view(),
                       .w_EOI = w.view(),
                       .y_RO = y.view(),
                       .offsets_E1 = offsets_->view(),
                       .rows_E = rows_->view()};
  const auto weight_row = [&](size_t expert, int64_t out) {
    return of_weights.row(weights, static_cast<int64_t>(expert) * kWidth + out);
  };
  // y[r, o] = sum over i of x[r, i] w[o, i], for some o.
  grouped_gemm_forward(ctx(), args);
  Values got, want;
  for (const int64_t row : spots_) {
    const Values outputs = y.row(row), input = first.row(table, token_of(row));
    for (const int64_t out : {int64_t{0}, int64_t{1}, int64_t{255}, int64_t{2048}, kWidth - 1}) {
      const Values weight = weight_row(expert_of(row), out);
      got.push_back(outputs[static_cast<size_t>(out)]);
      want.push_back(std::inner_product(input.begin(), input.end(), weight.begin(), 0.0));
    }
  }
  EXPECT_CLOSE(got, want, DType::kBF16) << "forward";
  // dx[r, i] = sum over o of dy[r, o] w[o, i], all i, for a few rows.
  args.y_RO = gradients.view();
  args.x_RI = y.view();
  grouped_gemm_dgrad(ctx(), args);
  got.clear();
  want.clear();
  for (const int64_t row : {spots_.front(), ends_[5] + counts_[5] - 1, ends_[7] + counts_[7] - 1}) {
    append(got, y.row(row));
    const Values gradient = second.row(other, token_of(row));
    Values sums(kWidth, 0.0);
    for (int64_t out = 0; out < kWidth; ++out) {
      const Values weight = weight_row(expert_of(row), out);
      for (size_t i = 0; i < sums.size(); ++i) sums[i] += gradient[static_cast<size_t>(out)] * weight[i];
    }
    append(want, sums);
  }
  EXPECT_CLOSE(got, want, DType::kBF16) << "dgrad";
  // dw[e, o, i] = sum over the expert's rows of dy[r, o] x[r, i], for some o and i.
  args.x_RI = rows.view();
  args.w_EOI = dw.view();
  grouped_gemm_wgrad(ctx(), args);
  got.clear();
  want.clear();
  for (const size_t e : {size_t{0}, size_t{3}, size_t{7}}) {
    for (const auto& [out, in] : {std::pair<int64_t, int64_t>{0, 0}, {kWidth - 1, kWidth - 1}, {17, 4000}}) {
      double sum = 0;
      for (int64_t row = ends_[e]; row < ends_[e] + counts_[e]; ++row) {
        const auto token = static_cast<size_t>(token_of(row));
        sum += other.values[static_cast<size_t>(second.tokens[token] * kWidth + out)] *
               table.values[static_cast<size_t>(first.tokens[token] * kWidth + in)];
      }
      want.push_back(sum);
      append(got, dw.elements((static_cast<int64_t>(e) * kWidth + out) * kWidth + in, 1));
    }
  }
  // Of 130,000 products, in 8,300 additions that each may lose 2^-23 of the sum so far.
  EXPECT_LE(unit_error(got, want), 1e-3) << "wgrad";
}

}  // namespace
}  // namespace biomoe::test
