#include "biomoe/ops/router.h"

#include <algorithm>
#include <cmath>

#include "biomoe/backend/cpu/parallel.h"
#include "biomoe/backend/cpu/row_kernel.h"
#include "biomoe/backend/cpu/vector_math.h"
#include "biomoe/backend/cpu/work_size.h"
#include "biomoe/ops/check_args.h"

namespace biomoe::cpu {
namespace {

// probs = softmax(logits); returns logsumexp. One NaN, an infinity or nothing but -inf makes the row NaN.
BIOMOE_ROW_KERNEL float softmax_row(const float* logits, float* probs, int64_t count) {
  float largest = logits[0];
#pragma omp simd reduction(max : largest)
  for (int64_t e = 0; e < count; ++e) largest = logits[e] > largest ? logits[e] : largest;
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t e = 0; e < count; ++e) {
    const float value = exp_f32(logits[e] - largest);
    probs[e] = value;
    sum += value;
  }
#pragma omp simd
  for (int64_t e = 0; e < count; ++e) probs[e] /= sum;
  return largest + std::log(sum);
}

// Inserts expert e among the `held` best, which stand in falling order of score; equal scores in order of
// arrival, that is of index. `wins` orders scores strictly.
template <typename Wins>
void insert_expert(int32_t e, float score, int64_t held, const Wins& wins, int32_t* experts, float* scores) {
  int64_t at = held;
  for (; at > 0 && wins(score, scores[at - 1]); --at) {
    experts[at] = experts[at - 1];
    scores[at] = scores[at - 1];
  }
  experts[at] = e;
  scores[at] = score;
}

template <typename Wins>
void select_experts(const float* scores, Range range, int64_t top_k, const Wins& wins, int32_t* experts,
                    float* best) {
  for (int64_t e = range.begin; e < range.end; ++e) {
    if (e >= top_k && !wins(scores[e], best[top_k - 1])) continue;
    insert_expert(static_cast<int32_t>(e), scores[e], std::min(e, top_k - 1), wins, experts, best);
  }
}

// The top_k largest of `probs`, none of them NaN, and their indices. Blocks without a candidate are passed
// over whole.
BIOMOE_ROW_KERNEL void select_largest(const float* probs, int64_t count, int64_t top_k, int32_t* experts,
                                      float* best) {
  constexpr int64_t kBlock = 16;
  const auto larger = [](float a, float b) { return a > b; };
  const int64_t start = std::min(count, top_k);
  select_experts(probs, {0, start}, top_k, larger, experts, best);
  for (int64_t begin = start; begin < count; begin += kBlock) {
    const int64_t end = std::min(count, begin + kBlock);
    int candidates = 0;
    const float least = best[top_k - 1];
#pragma omp simd reduction(| : candidates)
    for (int64_t e = begin; e < end; ++e) candidates |= probs[e] > least;
    if (candidates) select_experts(probs, {begin, end}, top_k, larger, experts, best);
  }
}

struct Row {
  const float* logits;
  float* probs;
  int32_t* experts;
  float* weights;
};

float route_row(const Row& row, int64_t num_experts, int64_t top_k) {
  const float lse = softmax_row(row.logits, row.probs, num_experts);
  if (std::isnan(row.probs[0])) {
    // All probabilities are NaN; the logits still tell which experts are numbers.
    const auto wins = [](float a, float b) { return a > b || (std::isnan(b) && !std::isnan(a)); };
    select_experts(row.logits, {0, num_experts}, top_k, wins, row.experts, row.weights);
    std::fill_n(row.weights, top_k, row.probs[0]);
    return lse;
  }
  select_largest(row.probs, num_experts, top_k, row.experts, row.weights);
  float sum = 0.0f;
  for (int64_t j = 0; j < top_k; ++j) sum += row.weights[j];
  for (int64_t j = 0; j < top_k; ++j) row.weights[j] /= sum;
  return lse;
}

BIOMOE_ROW_KERNEL void add_probs(const float* probs, double* sums, Range experts) {
#pragma omp simd
  for (int64_t e = experts.begin; e < experts.end; ++e) sums[e] += static_cast<double>(probs[e]);
}

// Statistics are added in order of token, so that a batch gives the same sums however it is cut.
void add_statistics(Context& ctx, const RouterForwardArgs& args) {
  constexpr int64_t kBandExperts = 16;
  const int64_t tokens = args.probs_TE.shape[0];
  const int64_t num_experts = args.probs_TE.shape[1];
  const int64_t stride = args.probs_TE.row_stride;
  const float* probs = args.probs_TE.f32();
  double* prob_sums = args.prob_sums_E.f64();
  const int64_t bands = ceil_div(num_experts, kBandExperts);
  const int64_t min_bands = ceil_div(kMinElementsPerThread, std::max<int64_t>(1, tokens * kBandExperts));
  parallel_ranges(ctx, bands, min_bands, [&](Range band) {
    const int64_t end = std::min(num_experts, band.end * kBandExperts);
    for (int64_t t = 0; t < tokens; ++t) {
      const float* row = probs + t * stride;
      add_probs(row, prob_sums, {band.begin * kBandExperts, end});
    }
  });
  int64_t* counts = args.counts_E.i64();
  const int32_t* experts = args.experts_Tk.i32();
  for (int64_t slot = 0; slot < args.experts_Tk.num_elements(); ++slot) ++counts[experts[slot]];
  double z_sum = *args.z_sum_1.f64();
  const float* lse = args.lse_T.f32();
  for (int64_t t = 0; t < tokens; ++t) z_sum += static_cast<double>(lse[t]) * static_cast<double>(lse[t]);
  *args.z_sum_1.f64() = z_sum;
}

// With c = sum_j weight_j dweight_j, the renormalised softmax gives d/dlogit = weight_j (dweight_j - c) for a
// selected expert and 0 for the others: the sum over all experts cancels since the weights sum to 1.
// With top_k = 1 the weight is exactly 1, c is dweight, and the gradient exactly 0.
void add_weight_gradient(const float* weights, const float* dweights, const int32_t* experts, int64_t top_k,
                         float* dlogits) {
  float mean = 0.0f;
  for (int64_t j = 0; j < top_k; ++j) mean += weights[j] * dweights[j];
  for (int64_t j = 0; j < top_k; ++j) dlogits[experts[j]] += weights[j] * (dweights[j] - mean);
}

// d/dlogits of sum_e balance_e probs_e + z_scale lse^2; its z part has the slope 2 z_scale lse.
BIOMOE_ROW_KERNEL void loss_gradient_row(const float* probs, const float* balance, float z_slope,
                                         float* dlogits, int64_t count) {
  if (balance) {
    float mean = 0.0f;
#pragma omp simd reduction(+ : mean)
    for (int64_t e = 0; e < count; ++e) mean += probs[e] * balance[e];
#pragma omp simd
    for (int64_t e = 0; e < count; ++e) dlogits[e] = probs[e] * (balance[e] - mean + z_slope);
  } else {
#pragma omp simd
    for (int64_t e = 0; e < count; ++e) dlogits[e] = probs[e] * z_slope;
  }
}

}  // namespace

void router_forward(Context& ctx, const RouterForwardArgs& args) {
  const int64_t num_experts = args.logits_TE.shape[1];
  const int64_t top_k = args.experts_Tk.shape[1];
  float* lse = args.lse_T.f32();
  parallel_ranges(ctx, args.logits_TE.shape[0], min_rows_per_thread(8 * num_experts), [&](Range rows) {
    for (int64_t t = rows.begin; t < rows.end; ++t) {
      lse[t] = route_row({.logits = args.logits_TE.f32() + t * args.logits_TE.row_stride,
                          .probs = args.probs_TE.f32() + t * args.probs_TE.row_stride,
                          .experts = args.experts_Tk.i32() + t * top_k,
                          .weights = args.weights_Tk.f32() + t * top_k},
                         num_experts, top_k);
    }
  });
  add_statistics(ctx, args);
}

void router_backward(Context& ctx, const RouterBackwardArgs& args) {
  const int64_t num_experts = args.probs_TE.shape[1];
  const int64_t top_k = args.experts_Tk.shape[1];
  check_ids("router_backward", "experts", args.experts_Tk, 0, num_experts);
  const float* lse = args.lse_T.f32();
  parallel_ranges(ctx, args.probs_TE.shape[0], min_rows_per_thread(4 * num_experts), [&](Range rows) {
    for (int64_t t = rows.begin; t < rows.end; ++t) {
      float* dlogits = args.dlogits_TE.f32() + t * args.dlogits_TE.row_stride;
      const auto z_slope = static_cast<float>(2.0 * args.z_scale * static_cast<double>(lse[t]));
      loss_gradient_row(args.probs_TE.f32() + t * args.probs_TE.row_stride, args.balance_E.f32(), z_slope,
                        dlogits, num_experts);
      const int64_t at = t * top_k;
      add_weight_gradient(args.weights_Tk.f32() + at, args.dweights_Tk.f32() + at, args.experts_Tk.i32() + at,
                          top_k, dlogits);
    }
  });
}

void balance_loss(Context&, const BalanceLossArgs& args) {
  const int64_t layers = args.counts_LE.shape[0], experts = args.counts_LE.shape[1];
  const int64_t together = args.over == BalanceOver::kAllLayers ? layers : 1;  // layers of one sum
  const double tokens = static_cast<double>(together) * static_cast<double>(args.tokens);
  const double routings = static_cast<double>(layers) * static_cast<double>(args.tokens);
  double loss = 0, z_sum = 0;
  for (int64_t first = 0; first < layers; first += together) {
    for (int64_t e = 0; e < experts; ++e) {
      int64_t count = 0;
      double prob_sum = 0;
      for (int64_t layer = first; layer < first + together; ++layer) {
        count += args.counts_LE.i64()[layer * experts + e];
        prob_sum += args.prob_sums_LE.f64()[layer * experts + e];
      }
      const double share = tokens > 0 ? static_cast<double>(count) / tokens : 0.0;
      loss += routings > 0 ? share * (prob_sum / routings) : 0.0;
      const double gradient =
          routings > 0 ? args.balance_coef * static_cast<double>(experts) * share / routings : 0.0;
      for (int64_t layer = first; layer < first + together; ++layer)
        args.balance_LE.f32()[layer * experts + e] = static_cast<float>(gradient);
    }
  }
  for (int64_t layer = 0; layer < layers; ++layer) z_sum += args.z_sums_L.f64()[layer];
  args.losses_2.f64()[0] = loss * static_cast<double>(experts);
  args.losses_2.f64()[1] = routings > 0 ? z_sum / routings : 0.0;
}

}  // namespace biomoe::cpu
