#include "biomoe/ops/scaled_swiglu.h"

#include "biomoe/backend/cpu/parallel.h"
#include "biomoe/backend/cpu/row_kernel.h"
#include "biomoe/backend/cpu/vector_math.h"
#include "biomoe/backend/cpu/work_size.h"

namespace biomoe::cpu {
namespace {

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

void scaled_swiglu_forward(Context& ctx, const ScaledSwigluForwardArgs& args) {
  const int64_t width = args.act_NF.shape[1];
  const float* probs = args.probs_N.f32();
  parallel_ranges(ctx, args.act_NF.shape[0], min_rows_per_thread(4 * width), [&](Range rows) {
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      const float* gate = args.gate_up_N2F.f32() + r * args.gate_up_N2F.row_stride;
      forward_row(gate, gate + width, probs[r], args.act_NF.f32() + r * args.act_NF.row_stride, width);
    }
  });
}

void scaled_swiglu_backward(Context& ctx, const ScaledSwigluBackwardArgs& args) {
  const int64_t width = args.dact_NF.shape[1];
  parallel_ranges(ctx, args.dact_NF.shape[0], min_rows_per_thread(4 * width), [&](Range rows) {
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      const float* gate = args.gate_up_N2F.f32() + r * args.gate_up_N2F.row_stride;
      float* dgate = args.dgate_up_N2F.f32() + r * args.dgate_up_N2F.row_stride;
      args.dprobs_N.f32()[r] = backward_row({.dact = args.dact_NF.f32() + r * args.dact_NF.row_stride,
                                             .gate = gate,
                                             .up = gate + width,
                                             .prob = args.probs_N.f32()[r],
                                             .dgate = dgate,
                                             .dup = dgate + width},
                                            width);
    }
  });
}

}  // namespace biomoe::cpu
