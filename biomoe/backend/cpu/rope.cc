#include "biomoe/ops/rope.h"

#include "biomoe/backend/cpu/parallel.h"
#include "biomoe/backend/cpu/row_kernel.h"
#include "biomoe/backend/cpu/work_size.h"
#include "biomoe/ops/check_args.h"

namespace biomoe::cpu {
namespace {

BIOMOE_ROW_KERNEL void rotate_head(float* head, const float* cosines, const float* sines, float sign,
                                   int64_t half) {
  float* first = head;
  float* second = head + half;
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    const float a = first[i];
    const float b = second[i];
    const float sine = sign * sines[i];
    first[i] = a * cosines[i] - b * sine;
    second[i] = b * cosines[i] + a * sine;
  }
}

}  // namespace

void rope(Context& ctx, const RopeArgs& args) {
  check_ids("rope", "positions", args.positions_T, 0, args.cos_SK2.shape[0]);
  const int64_t half = args.head_dim / 2;
  const float sign = args.inverse ? -1.0f : 1.0f;
  const int32_t* positions = args.positions_T.i32();
  const float* cosines = args.cos_SK2.f32();
  const float* sines = args.sin_SK2.f32();
  float* x = args.x_TC.f32();
  const int64_t rotated = args.num_heads * args.head_dim;
  parallel_ranges(ctx, args.x_TC.shape[0], min_rows_per_thread(rotated), [&](Range rows) {
    for (int64_t t = rows.begin; t < rows.end; ++t) {
      const int64_t at = positions[t] * half;
      float* row = x + t * args.x_TC.row_stride;
      for (int64_t head = 0; head < args.num_heads; ++head) {
        rotate_head(row + head * args.head_dim, cosines + at, sines + at, sign, half);
      }
    }
  });
}

}  // namespace biomoe::cpu
