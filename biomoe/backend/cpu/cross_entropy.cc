#include "biomoe/ops/cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "biomoe/backend/cpu/parallel.h"
#include "biomoe/backend/cpu/row_kernel.h"
#include "biomoe/backend/cpu/vector_math.h"
#include "biomoe/backend/cpu/work_size.h"
#include "biomoe/ops/check_args.h"

namespace biomoe::cpu {
namespace {

BIOMOE_ROW_KERNEL float largest_of(const float* x, int64_t count) {
  float largest = x[0];
#pragma omp simd reduction(max : largest)
  for (int64_t i = 0; i < count; ++i) largest = x[i] > largest ? x[i] : largest;
  return largest;
}

// The row's negative log-likelihood; a NaN or +inf logit makes it NaN through the sum.
BIOMOE_ROW_KERNEL float forward_row(const float* logits, int64_t count, int32_t target) {
  const float largest = largest_of(logits, count);
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) sum += exp_f32(logits[i] - largest);
  return std::log(sum) - (logits[target] - largest);
}

// The same, leaving scale * (softmax - onehot) in place of the logits.
BIOMOE_ROW_KERNEL float forward_backward_row(float* logits, int64_t count, int32_t target, float scale) {
  const float largest = largest_of(logits, count);
  const float target_logit = logits[target] - largest;
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) {
    const float value = exp_f32(logits[i] - largest);
    logits[i] = value;
    sum += value;
  }
  // The target's p - 1 loses its digits where p is near 1; the others sum to the same without loss.
  const float inverse = 1.0f / sum;
  const float target_value = logits[target];
  const float factor = scale * inverse;
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) logits[i] *= factor;
  logits[target] = scale * ((target_value - sum) * inverse);
  return std::log(sum) - target_logit;
}

}  // namespace

void cross_entropy(Context& ctx, const CrossEntropyArgs& args) {
  const int64_t vocabulary = args.logits_TV.shape[1];
  check_ids("cross_entropy", "targets", args.targets_T, std::numeric_limits<int32_t>::min(), vocabulary);
  const int32_t* targets = args.targets_T.i32();
  const float* weights = args.weights_T.f32();
  float* nll = args.nll_T.f32();
  const double grad_scale = args.write_gradient ? *args.grad_scale_1.f64() : 0.0;
  parallel_ranges(ctx, args.logits_TV.shape[0], min_rows_per_thread(4 * vocabulary), [&](Range rows) {
    for (int64_t t = rows.begin; t < rows.end; ++t) {
      float* logits = args.logits_TV.f32() + t * args.logits_TV.row_stride;
      if (targets[t] < 0 || weights[t] == 0.0f) {
        nll[t] = 0.0f;
        if (args.write_gradient) std::fill_n(logits, vocabulary, 0.0f);
      } else if (args.write_gradient) {
        const auto scale = static_cast<float>(static_cast<double>(weights[t]) * grad_scale);
        nll[t] = forward_backward_row(logits, vocabulary, targets[t], scale);
      } else {
        nll[t] = forward_row(logits, vocabulary, targets[t]);
      }
    }
  });
}

void loss_sums(Context&, const LossSumsArgs& args) {
  const float* nll = args.nll_T.f32();
  const float* weights = args.weights_T.f32();
  double weighted = 0, plain = 0, count = 0;
  for (int64_t t = 0; t < args.nll_T.shape[0]; ++t) {
    if (weights[t] == 0.0f) continue;
    weighted += static_cast<double>(weights[t]) * static_cast<double>(nll[t]);
    plain += static_cast<double>(nll[t]);
    count += 1;
  }
  double* sums = args.sums_3.f64();
  sums[0] += weighted;
  sums[1] += plain;
  sums[2] += count;
}

}  // namespace biomoe::cpu
