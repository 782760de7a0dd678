#include "biomoe/ops/peer_dispatch.h"

#include <algorithm>

#include "biomoe/backend/cpu/parallel.h"
#include "biomoe/backend/cpu/work_size.h"
#include "biomoe/ops/check_args.h"

namespace biomoe::cpu {
namespace {

const TensorView& of_slot(std::span<const TensorView> ranks, const int32_t* experts, int64_t slot,
                          int64_t held) {
  return ranks[static_cast<size_t>(experts[slot] / held)];
}

}  // namespace

void peer_plan(Context&, const PeerPlanArgs& args) {
  const int64_t ranks = args.counts_PE.shape[0], experts = args.counts_PE.shape[1], held = experts / ranks;
  const int32_t* counts = args.counts_PE.i32();
  const int64_t* begins = args.begins_E1.i64();
  const int32_t* expert_of_slot = args.experts_Tk.i32();
  check_ids("peer_plan", "experts", args.experts_Tk, 0, experts);
  const int64_t slots = args.experts_Tk.num_elements();
  int32_t* row_of_slot = args.row_of_slot_N.i32();
  int64_t offset = 0;
  for (int64_t e = 0; e < experts; ++e) {
    if (e % held == 0) offset = 0;
    int64_t rows = 0, before = 0;
    for (int64_t p = 0; p < ranks; ++p) {
      if (p < args.rank) before += counts[p * experts + e];
      rows += counts[p * experts + e];
    }
    for (int64_t slot = 0; slot < slots; ++slot) {
      if (expert_of_slot[slot] != e) continue;
      row_of_slot[slot] += static_cast<int32_t>(offset + before - begins[e]);
    }
    if (e / held == args.rank) {
      args.offsets_E1.i64()[e % held] = offset;
      args.rows_E.i32()[e % held] = static_cast<int32_t>(rows);
    }
    offset += ceil_div(rows, args.row_alignment) * args.row_alignment;
    if (e / held == args.rank) args.offsets_E1.i64()[e % held + 1] = offset;
  }
}

void send_rows(Context& ctx, const SendRowsArgs& args) {
  const int64_t width = args.x_TD.shape[1], top_k = args.experts_Tk.shape[1];
  const int32_t* experts = args.experts_Tk.i32();
  const int32_t* row_of_slot = args.row_of_slot_N.i32();
  parallel_ranges(ctx, args.experts_Tk.num_elements(), min_rows_per_thread(width), [&](Range slots) {
    for (int64_t s = slots.begin; s < slots.end; ++s) {
      const TensorView& y = of_slot(args.y_PRD, experts, s, args.held_experts);
      std::copy_n(args.x_TD.f32() + s / top_k * args.x_TD.row_stride, width,
                  y.f32() + row_of_slot[s] * y.row_stride);
      if (!args.values_N) continue;
      of_slot(args.y_values_PR, experts, s, args.held_experts).f32()[row_of_slot[s]] = args.values_N.f32()[s];
    }
  });
}

void fetch_rows(Context& ctx, const FetchRowsArgs& args) {
  const int64_t width = args.x_TD.shape[1], top_k = args.experts_Tk.shape[1];
  const int32_t* experts = args.experts_Tk.i32();
  const int32_t* row_of_slot = args.row_of_slot_N.i32();
  parallel_ranges(ctx, args.x_TD.shape[0], min_rows_per_thread(width * top_k), [&](Range tokens) {
    for (int64_t t = tokens.begin; t < tokens.end; ++t) {
      float* x = args.x_TD.f32() + t * args.x_TD.row_stride;
      for (int64_t s = t * top_k; s < (t + 1) * top_k; ++s) {
        const TensorView& y = of_slot(args.y_PRD, experts, s, args.held_experts);
        const float* row = y.f32() + row_of_slot[s] * y.row_stride;
        for (int64_t i = 0; i < width; ++i) x[i] = (s == t * top_k ? 0.0f : x[i]) + row[i];
        if (!args.values_N) continue;
        args.values_N.f32()[s] =
            of_slot(args.y_values_PR, experts, s, args.held_experts).f32()[row_of_slot[s]];
      }
    }
  });
}

void zero_padding(Context&, const ZeroPaddingArgs& args) {
  const int64_t* offsets = args.offsets_E1.i64();
  for (int64_t e = 0; e < args.rows_E.shape[0]; ++e) {
    for (int64_t row = offsets[e] + args.rows_E.i32()[e]; row < offsets[e + 1]; ++row) {
      std::fill_n(args.x_RD.f32() + row * args.x_RD.row_stride, args.x_RD.shape[1], 0.0f);
      if (args.values_R) args.values_R.f32()[row] = 0.0f;
    }
  }
}

}  // namespace biomoe::cpu
