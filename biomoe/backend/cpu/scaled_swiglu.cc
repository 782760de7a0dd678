#include "biomoe/backend/cpu/scaled_swiglu_rows.h"

#include "biomoe/backend/cpu/row_kernel.h"
#include "biomoe/backend/cpu/vector_math.h"
#include "biomoe/backend/cpu/work_size.h"

namespace biomoe::cpu {
namespace {

// Rows that hold something, and how a row's gate and up columns lie: runs of `run` gate columns, each
// followed by as many up columns.
template <typename Args>
int64_t rows_in_use(const Args& args, int64_t rows) {
  return args.offsets_E1 ? args.offsets_E1.i64()[args.offsets_E1.shape[0] - 1] : rows;
}

int64_t run_length(int64_t interleave, int64_t width) {
  return interleave > 0 ? interleave : width;
}

// Asks for the next row while this one is computed: the rows come from memory, and of the two or three
// streams that a row is, hardware fetches one ahead.
inline void prefetch_row(const float* row, int64_t width) {
  constexpr int64_t kLineElements = 16;
  for (int64_t i = 0; i < width; i += kLineElements) __builtin_prefetch(row + i);
}

BIOMOE_ROW_KERNEL void forward_row(const float* gate, const float* up, float prob, float* act,
                                   int64_t width) {
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) act[i] = gate[i] * sigmoid_f32(gate[i]) * up[i] * prob;
}

struct BackwardRow {
  const float* dact;
  const float* gate;
  const float* up;
  float prob;
  float* dgate;  // may be gate
  float* dup;    // may be up
};

// silu'(g) = s + g s (1 - s) with s = sigmoid(g). Returns the gradient of the probability.
BIOMOE_ROW_KERNEL float backward_row(const BackwardRow& row, int64_t width) {
  const float* dact = row.dact;
  const float* gate = row.gate;
  const float* up = row.up;
  float* dgate = row.dgate;
  float* dup = row.dup;
  const float prob = row.prob;
  float dprob = 0.0f;
#pragma omp simd reduction(+ : dprob)
  for (int64_t i = 0; i < width; ++i) {
    const float g = gate[i];
    const float u = up[i];
    const float sigmoid = sigmoid_f32(g);
    const float silu = g * sigmoid;
    const float dsilu = sigmoid + silu * (1.0f - sigmoid);
    const float scaled = dact[i] * prob;
    dprob += dact[i] * (silu * u);
    dgate[i] = scaled * u * dsilu;
    dup[i] = scaled * silu;
  }
  return dprob;
}

}  // namespace

void scaled_swiglu_forward_rows(const ScaledSwigluForwardArgs& args, Range rows) {
  const int64_t width = args.act_RF.shape[1];
  const int64_t run = run_length(args.interleave, width);
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    const float* gate_up = args.gate_up_R2F.f32() + r * args.gate_up_R2F.row_stride;
    float* act = args.act_RF.f32() + r * args.act_RF.row_stride;
    if (r + 1 < rows.end) prefetch_row(gate_up + args.gate_up_R2F.row_stride, 2 * width);
    for (int64_t f = 0; f < width; f += run) {
      forward_row(gate_up + 2 * f, gate_up + 2 * f + run, args.probs_R.f32()[r], act + f, run);
    }
  }
}

void scaled_swiglu_backward_rows(const ScaledSwigluBackwardArgs& args, Range rows) {
  const int64_t width = args.dact_RF.shape[1];
  const int64_t run = run_length(args.interleave, width);
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    const float* gate_up = args.gate_up_R2F.f32() + r * args.gate_up_R2F.row_stride;
    const float* dact = args.dact_RF.f32() + r * args.dact_RF.row_stride;
    if (r + 1 < rows.end) {
      prefetch_row(gate_up + args.gate_up_R2F.row_stride, 2 * width);
      prefetch_row(dact + args.dact_RF.row_stride, width);
    }
    float* dgate_up = args.dgate_up_R2F.f32() + r * args.dgate_up_R2F.row_stride;
    float dprob = 0.0f;
    for (int64_t f = 0; f < width; f += run) {
      dprob += backward_row({.dact = dact + f,
                             .gate = gate_up + 2 * f,
                             .up = gate_up + 2 * f + run,
                             .prob = args.probs_R.f32()[r],
                             .dgate = dgate_up + 2 * f,
                             .dup = dgate_up + 2 * f + run},
                            run);
    }
    args.dprobs_R.f32()[r] = dprob;
  }
}

void scaled_swiglu_forward(Context& ctx, const ScaledSwigluForwardArgs& args) {
  parallel_ranges(ctx, rows_in_use(args, args.act_RF.shape[0]), min_rows_per_thread(4 * args.act_RF.shape[1]),
                  [&](Range rows) { scaled_swiglu_forward_rows(args, rows); });
}

void scaled_swiglu_backward(Context& ctx, const ScaledSwigluBackwardArgs& args) {
  parallel_ranges(ctx, rows_in_use(args, args.dact_RF.shape[0]),
                  min_rows_per_thread(4 * args.dact_RF.shape[1]),
                  [&](Range rows) { scaled_swiglu_backward_rows(args, rows); });
}

}  // namespace biomoe::cpu
