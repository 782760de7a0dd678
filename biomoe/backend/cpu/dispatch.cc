#include "biomoe/ops/dispatch.h"

#include <algorithm>

#include "biomoe/backend/cpu/parallel.h"
#include "biomoe/backend/cpu/row_kernel.h"
#include "biomoe/backend/cpu/work_size.h"
#include "biomoe/ops/check_args.h"

namespace biomoe::cpu {
namespace {

// x = (accumulate ? x : 0) + rows in order.
BIOMOE_ROW_KERNEL void sum_rows(const float* y, int64_t stride, const int32_t* rows, int64_t top_k,
                                bool accumulate, float* x, int64_t width) {
  int64_t next = 0;
  if (!accumulate) {
    std::copy_n(y + rows[0] * stride, width, x);
    next = 1;
  }
  for (; next + 1 < top_k; next += 2) {
    const float* first = y + rows[next] * stride;
    const float* second = y + rows[next + 1] * stride;
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) x[i] = (x[i] + first[i]) + second[i];
  }
  if (next < top_k) {
    const float* last = y + rows[next] * stride;
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) x[i] += last[i];
  }
}

}  // namespace

// rows_E serves as the histogram and then as the count of rows written: no other memory is needed.
void dispatch_plan(Context&, const DispatchPlanArgs& args) {
  const int64_t num_experts = args.offsets_E1.shape[0] - 1;
  check_ids("dispatch_plan", "experts", args.experts_Tk, 0, num_experts);
  const int64_t slots = args.experts_Tk.num_elements();
  const int32_t* experts = args.experts_Tk.i32();
  int64_t* offsets = args.offsets_E1.i64();
  int32_t* counts = args.rows_E.i32();
  int32_t* row_of_slot = args.row_of_slot_N.i32();
  int32_t* slot_of_row = args.slot_of_row_R.i32();
  std::fill_n(counts, num_experts, 0);
  for (int64_t slot = 0; slot < slots; ++slot) ++counts[experts[slot]];
  offsets[0] = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    offsets[e + 1] = offsets[e] + ceil_div(counts[e], args.row_alignment) * args.row_alignment;
    std::fill(slot_of_row + offsets[e] + counts[e], slot_of_row + offsets[e + 1], -1);
  }
  std::fill(slot_of_row + offsets[num_experts], slot_of_row + args.slot_of_row_R.shape[0], -1);
  std::fill_n(counts, num_experts, 0);
  for (int64_t slot = 0; slot < slots; ++slot) {
    const int64_t row = offsets[experts[slot]] + counts[experts[slot]]++;
    row_of_slot[slot] = static_cast<int32_t>(row);
    slot_of_row[row] = static_cast<int32_t>(slot);
  }
}

void permute(Context& ctx, const PermuteArgs& args) {
  const int64_t width = args.x_TD.shape[1];
  check_ids("permute", "slot_of_row", args.slot_of_row_R, -1, args.x_TD.shape[0] * args.top_k);
  const int32_t* slot_of_row = args.slot_of_row_R.i32();
  const float* x = args.x_TD.f32();
  const float* values = args.values_N.f32();
  float* y = args.y_RD.f32();
  float* y_values = args.y_values_R.f32();
  const auto top_k = static_cast<int32_t>(args.top_k);
  parallel_ranges(ctx, args.y_RD.shape[0], min_rows_per_thread(width), [&](Range rows) {
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      const int32_t slot = slot_of_row[r];
      float* y_row = y + r * args.y_RD.row_stride;
      if (slot < 0) {
        std::fill_n(y_row, width, 0.0f);
      } else {
        std::copy_n(x + slot / top_k * args.x_TD.row_stride, width, y_row);
      }
      if (values) y_values[r] = slot < 0 ? 0.0f : values[slot];
    }
  });
}

void unpermute(Context& ctx, const UnpermuteArgs& args) {
  const int64_t width = args.x_TD.shape[1];
  const int64_t top_k = args.top_k;
  check_ids("unpermute", "row_of_slot", args.row_of_slot_N, 0, args.y_RD.shape[0]);
  const int32_t* row_of_slot = args.row_of_slot_N.i32();
  const float* y = args.y_RD.f32();
  const float* y_values = args.y_values_R.f32();
  float* x = args.x_TD.f32();
  float* values = args.values_N.f32();
  parallel_ranges(ctx, args.x_TD.shape[0], min_rows_per_thread(width * top_k), [&](Range tokens) {
    for (int64_t t = tokens.begin; t < tokens.end; ++t) {
      const int32_t* rows = row_of_slot + t * top_k;
      sum_rows(y, args.y_RD.row_stride, rows, top_k, args.accumulate, x + t * args.x_TD.row_stride, width);
      if (!y_values) continue;
      for (int64_t j = 0; j < top_k; ++j) values[t * top_k + j] = y_values[rows[j]];
    }
  });
}

}  // namespace biomoe::cpu
