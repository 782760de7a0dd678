#include "biomoe/ops/dispatch.h"
#include "tests/cuda/gpu_test.h"

namespace biomoe::test {
namespace {

struct Plan {
  std::vector<double> offsets, rows, row_of_slot, slot_of_row;
};

// Slots in order, each to the next row of its expert.
Plan plan_of(const std::vector<int32_t>& experts, int64_t num_experts, int64_t alignment) {
  Plan plan;
  const auto capacity = row_capacity(static_cast<int64_t>(experts.size()), num_experts, alignment);
  plan.row_of_slot.resize(experts.size());
  plan.slot_of_row.assign(static_cast<size_t>(capacity), -1.0);
  int64_t row = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    plan.offsets.push_back(static_cast<double>(row));
    int64_t count = 0;
    for (size_t slot = 0; slot < experts.size(); ++slot) {
      if (experts[slot] != e) continue;
      plan.row_of_slot[slot] = static_cast<double>(row + count);
      plan.slot_of_row[static_cast<size_t>(row + count++)] = static_cast<double>(slot);
    }
    plan.rows.push_back(static_cast<double>(count));
    row += (count + alignment - 1) / alignment * alignment;
  }
  plan.offsets.push_back(static_cast<double>(row));
  return plan;
}

struct Sizes {
  int64_t tokens, top_k, experts, alignment;
};

const std::vector<Sizes> kSizes = {{0, 2, 8, 128},    {1, 1, 1, 1},     {1, 2, 8, 128},     {127, 2, 8, 128},
                                   {128, 2, 8, 128},  {129, 2, 8, 128}, {257, 3, 5, 1},     {85, 3, 300, 16},
                                   {600, 8, 64, 128}, {20, 2, 4096, 8}, {70000, 4, 64, 128}};

class CudaDispatchTest : public GpuTest {
 protected:
  void expect_plan(const std::vector<int32_t>& experts, const Sizes& s) {
    SCOPED_TRACE(fmt::format("{} x {} to {} experts", s.tokens, s.top_k, s.experts));
    const Plan want = plan_of(experts, s.experts, s.alignment);
    const int64_t slots = s.tokens * s.top_k;
    GpuTensor expert(ctx(), DType::kI32, Shape{s.tokens, s.top_k}),
        offsets(ctx(), DType::kI64, Shape{s.experts + 1});
    GpuTensor rows(ctx(), DType::kI32, Shape{s.experts}), row_of_slot(ctx(), DType::kI32, Shape{slots});
    GpuTensor slot_of_row(ctx(), DType::kI32, Shape{static_cast<int64_t>(want.slot_of_row.size())});
    expert.set(doubles(experts));
    slot_of_row.fill(7);
    dispatch_plan(with_scratch(dispatch_plan_scratch_bytes(Device::kCuda, slots, s.experts)),
                  {.experts_Tk = expert.view(),
                   .offsets_E1 = offsets.view(),
                   .rows_E = rows.view(),
                   .row_of_slot_N = row_of_slot.view(),
                   .slot_of_row_R = slot_of_row.view(),
                   .row_alignment = s.alignment});
    EXPECT_EQ(offsets.values(), want.offsets);
    EXPECT_EQ(rows.values(), want.rows);
    EXPECT_EQ(row_of_slot.values(), want.row_of_slot);
    EXPECT_EQ(slot_of_row.values(), want.slot_of_row);
    EXPECT_TRUE(offsets.padding_untouched() && rows.padding_untouched() && row_of_slot.padding_untouched() &&
                slot_of_row.padding_untouched());
  }
};

TEST_F(CudaDispatchTest, PlanIsAStableSortByExpertWithPadding) {
  for (const Sizes& s : kSizes) expect_plan(ids(1, s.tokens * s.top_k, s.experts), s);
  for (const int32_t only : {0, 3, 6}) expect_plan(std::vector<int32_t>(700, only), {350, 2, 7, 128});
}

TEST_F(CudaDispatchTest, RowsGoThereAndBack) {
  for (const DType dtype : kComputeTypes) {
    for (const Sizes& s : kSizes) {
      if (s.tokens > 1000) continue;
      for (const int64_t width : {int64_t{1}, int64_t{15}, int64_t{16}, int64_t{4104}}) {
        SCOPED_TRACE(fmt::format("{} {} x {} of {}", dtype_name(dtype), s.tokens, s.top_k, width));
        const Plan plan = plan_of(ids(1, s.tokens * s.top_k, s.experts), s.experts, s.alignment);
        const int64_t slots = s.tokens * s.top_k, rows = static_cast<int64_t>(plan.slot_of_row.size());
        if (rows * width > 20000000) continue;
        GpuTensor x(ctx(), dtype, Shape{s.tokens, width}), y(ctx(), dtype, Shape{rows, width}, 8);
        GpuTensor values(ctx(), DType::kF32, Shape{s.tokens, s.top_k}),
            y_values(ctx(), DType::kF32, Shape{rows});
        GpuTensor slot_of_row(ctx(), DType::kI32, Shape{rows}), row_of_slot(ctx(), DType::kI32, Shape{slots});
        x.set(normals(2, x.size(), dtype));
        values.set(normals(3, slots, DType::kF32));
        slot_of_row.set(plan.slot_of_row);
        row_of_slot.set(plan.row_of_slot);
        permute(ctx(), {.x_TD = x.view(),
                        .slot_of_row_R = slot_of_row.view(),
                        .y_RD = y.view(),
                        .values_N = values.view(),
                        .y_values_R = y_values.view(),
                        .top_k = s.top_k});
        const auto in = x.values(), slot_values = values.values();
        std::vector<double> want, want_values;
        for (const double slot : plan.slot_of_row) {
          const auto at = static_cast<int64_t>(slot);
          want_values.push_back(at < 0 ? 0.0 : slot_values[static_cast<size_t>(at)]);
          for (int64_t i = 0; i < width; ++i) {
            want.push_back(at < 0 ? 0.0 : in[static_cast<size_t>(at / s.top_k * width + i)]);
          }
        }
        EXPECT_EQ(y.values(), want);
        EXPECT_EQ(y_values.values(), want_values);
        EXPECT_TRUE(y.padding_untouched() && y_values.padding_untouched());

        y.set(normals(4, y.size(), dtype));  // as outputs of experts: the rows of a token differ
        const auto out = y.values();
        std::vector<double> sums(in.size(), 0.0);
        for (size_t slot = 0; slot < plan.row_of_slot.size(); ++slot) {
          for (int64_t i = 0; i < width; ++i) {
            sums[slot / static_cast<size_t>(s.top_k) * static_cast<size_t>(width) + static_cast<size_t>(i)] +=
                out[static_cast<size_t>(static_cast<int64_t>(plan.row_of_slot[slot]) * width + i)];
          }
        }
        GpuTensor back(ctx(), dtype, Shape{s.tokens, width}, 8),
            values_back(ctx(), DType::kF32, Shape{slots});
        UnpermuteArgs args{.y_RD = y.view(),
                           .row_of_slot_N = row_of_slot.view(),
                           .x_TD = back.view(),
                           .y_values_R = y_values.view(),
                           .values_N = values_back.view(),
                           .top_k = s.top_k};
        unpermute(ctx(), args);
        EXPECT_CLOSE(back.values(), sums, dtype);
        EXPECT_EQ(values_back.values(), slot_values);
        EXPECT_TRUE(back.padding_untouched() && values_back.padding_untouched());
        args.x_TD = x.view();
        args.accumulate = true;
        unpermute(ctx(), args);
        EXPECT_CLOSE(x.values(), sum_of(in, sums), dtype);
      }
    }
  }
}

}  // namespace
}  // namespace biomoe::test
