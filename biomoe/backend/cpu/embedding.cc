#include "biomoe/ops/embedding.h"

#include <algorithm>

#include "biomoe/backend/cpu/parallel.h"
#include "biomoe/backend/cpu/row_kernel.h"
#include "biomoe/backend/cpu/work_size.h"
#include "biomoe/ops/check_args.h"

namespace biomoe::cpu {
namespace {

BIOMOE_ROW_KERNEL void add_row(const float* from, int64_t count, float* to) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) to[i] += from[i];
}

}  // namespace

void embedding_forward(Context& ctx, const EmbeddingForwardArgs& args) {
  check_ids("embedding_forward", "tokens", args.tokens_T, 0, args.weight_VD.shape[0]);
  const int64_t width = args.weight_VD.shape[1];
  const int32_t* tokens = args.tokens_T.i32();
  const float* weight = args.weight_VD.f32();
  float* y = args.y_TD.f32();
  const int64_t stride = args.y_TD.row_stride;
  parallel_ranges(ctx, args.tokens_T.shape[0], min_rows_per_thread(width), [&](Range rows) {
    for (int64_t t = rows.begin; t < rows.end; ++t) {
      std::copy_n(weight + tokens[t] * width, width, y + t * stride);
    }
  });
}

// Threads share the columns, so that each sums in order of token; a band is whole cache lines.
void embedding_backward(Context& ctx, const EmbeddingBackwardArgs& args) {
  check_ids("embedding_backward", "tokens", args.tokens_T, 0, args.dweight_VD.shape[0]);
  constexpr int64_t kBandColumns = 32;
  const int64_t width = args.dweight_VD.shape[1];
  const int64_t tokens_count = args.tokens_T.shape[0];
  const int32_t* tokens = args.tokens_T.i32();
  const float* dy = args.dy_TD.f32();
  float* dweight = args.dweight_VD.f32();
  const int64_t stride = args.dy_TD.row_stride;
  const int64_t bands = ceil_div(width, kBandColumns);
  const int64_t min_bands =
      ceil_div(kMinElementsPerThread, std::max<int64_t>(1, tokens_count * kBandColumns));
  parallel_ranges(ctx, bands, min_bands, [&](Range band) {
    const int64_t begin = band.begin * kBandColumns;
    const int64_t count = std::min(width, band.end * kBandColumns) - begin;
    if (!args.accumulate) {
      for (int64_t id = 0; id < args.dweight_VD.shape[0]; ++id)
        std::fill_n(dweight + id * width + begin, count, 0.0f);
    }
    for (int64_t t = 0; t < tokens_count; ++t) {
      add_row(dy + t * stride + begin, count, dweight + tokens[t] * width + begin);
    }
  });
}

}  // namespace biomoe::cpu
