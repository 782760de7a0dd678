#include "biomoe/ops/adamw.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "biomoe/backend/cpu/parallel.h"
#include "biomoe/backend/cpu/row_kernel.h"
#include "biomoe/backend/cpu/work_size.h"
#include "biomoe/core/error.h"

namespace biomoe::cpu {
namespace {

// Sums are taken over blocks fixed by the size of a segment alone, and then in order of block.
constexpr int64_t kMinBlockElements = 16384;
constexpr int64_t kMaxBlocks = 256;

BIOMOE_ROW_KERNEL double block_sum(const float* x, int64_t count) {
  double sum = 0.0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return sum;
}

double segment_sum(const Context& ctx, const float* x, int64_t count) {
  std::array<double, kMaxBlocks> sums;
  const int64_t size = std::max(kMinBlockElements, ceil_div(count, kMaxBlocks));
  const int64_t blocks = ceil_div(count, size);
  parallel_ranges(ctx, blocks, 1, [&](Range range) {
    for (int64_t block = range.begin; block < range.end; ++block) {
      const int64_t begin = block * size;
      sums[static_cast<size_t>(block)] = block_sum(x + begin, std::min(size, count - begin));
    }
  });
  double sum = 0.0;
  for (int64_t block = 0; block < blocks; ++block) sum += sums[static_cast<size_t>(block)];
  return sum;
}

struct Coefficients {
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float grad_scale;
  float decay;            // lr * weight_decay, or 0
  float step_size;        // lr / (1 - beta1^step)
  float root_correction;  // sqrt(1 - beta2^step)
  float eps;
};

Coefficients coefficients(const AdamwArgs& args, bool decay) {
  const double* update = args.update_5.f64();
  return {.beta1 = static_cast<float>(args.beta1),
          .one_minus_beta1 = static_cast<float>(1.0 - args.beta1),
          .beta2 = static_cast<float>(args.beta2),
          .one_minus_beta2 = static_cast<float>(1.0 - args.beta2),
          .grad_scale = static_cast<float>(update[kGradScale]),
          .decay = static_cast<float>(decay ? update[kLr] * args.weight_decay : 0.0),
          .step_size = static_cast<float>(update[kLr] / update[kCorrection1]),
          .root_correction = static_cast<float>(std::sqrt(update[kCorrection2])),
          .eps = static_cast<float>(args.eps)};
}

BIOMOE_ROW_KERNEL void update(const AdamwArgs& args, const Coefficients& c, Range range) {
  float* param = args.weights_A.f32();
  const float* grad = args.grad_A.f32();
  float* exp_avg = args.exp_avg_A.f32();
  float* exp_avg_sq = args.exp_avg_sq_A.f32();
#pragma omp simd
  for (int64_t i = range.begin; i < range.end; ++i) {
    const float g = grad[i] * c.grad_scale;
    const float m = c.beta1 * exp_avg[i] + c.one_minus_beta1 * g;
    const float v = c.beta2 * exp_avg_sq[i] + c.one_minus_beta2 * (g * g);
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    const float kept = param[i] - c.decay * param[i];
    param[i] = kept - c.step_size * (m / (std::sqrt(v) / c.root_correction + c.eps));
  }
}

}  // namespace

void sum_squares(Context& ctx, const SumSquaresArgs& args) {
  const float* x = args.x_A.f32();
  double* sums = args.sums_S.f64();
  for (size_t i = 0; i < args.segments.size(); ++i) {
    if (!args.partials.empty() && args.partials[i]) {
      const TensorView& partials = args.partials[i];
      sums[i] = std::accumulate(partials.f32(), partials.f32() + partials.num_elements(), 0.0);
    } else {
      sums[i] = segment_sum(ctx, x + args.segments[i].begin, args.segments[i].count);
    }
  }
}

void clip_factor(Context&, const ClipFactorArgs& args) {
  double sum = 0;
  for (int64_t i = 0; i < args.sums_S.num_elements(); ++i) sum += args.sums_S.f64()[i];
  const double norm = std::sqrt(sum);
  bool finite = std::isfinite(norm);
  if (args.loss_sums_3) {
    for (int i = 0; i < 3; ++i) finite = finite && std::isfinite(args.loss_sums_3.f64()[i]);
  }
  *args.norm_1.f64() = norm;
  *args.factor_1.f64() = args.max_norm > 0 ? std::min(1.0, args.max_norm / (norm + 1e-6)) : 1.0;
  *args.apply_1.f64() = finite ? 1.0 : 0.0;
}

void adamw(Context& ctx, const AdamwArgs& args) {
  BM_CHECK(!args.master_A && !args.remainder_A,
           "adamw: on the CPU the weights are fp32 and their own master");
  if (args.update_5.f64()[kApply] == 0) return;
  const Coefficients with_decay = coefficients(args, true);
  const Coefficients without_decay = coefficients(args, false);
  for (const ArenaSegment& segment : args.segments) {
    const Coefficients& c = segment.decay ? with_decay : without_decay;
    parallel_ranges(ctx, segment.count, kMinElementsPerThread, [&](Range range) {
      update(args, c, {segment.begin + range.begin, segment.begin + range.end});
    });
  }
}

}  // namespace biomoe::cpu
