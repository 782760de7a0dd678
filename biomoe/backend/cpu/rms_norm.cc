#include "biomoe/ops/rms_norm.h"

#include <algorithm>
#include <cmath>

#include "biomoe/backend/cpu/parallel.h"
#include "biomoe/backend/cpu/row_kernel.h"
#include "biomoe/backend/cpu/work_size.h"

namespace biomoe {
namespace {

// Rows whose contributions to dweight are summed into one partial: fixed by the shape alone, so that the
// order of summation is too.
constexpr int64_t kMinBlockRows = 32;
constexpr int64_t kMaxBlocks = 256;

int64_t block_rows(int64_t tokens) {
  return std::max(kMinBlockRows, cpu::ceil_div(tokens, kMaxBlocks));
}

int64_t block_count(int64_t tokens) {
  return cpu::ceil_div(tokens, block_rows(tokens));
}

}  // namespace

size_t cpu::rms_norm_backward_scratch_bytes(int64_t tokens, int64_t width) {
  return align_up(static_cast<size_t>(block_count(tokens) * width) * sizeof(float));
}

namespace cpu {
namespace {

// sum = x + residual, and the sum of its squares.
BIOMOE_ROW_KERNEL float add_rows(const float* x, const float* residual, float* sum, int64_t width) {
  float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < width; ++i) {
    const float value = x[i] + residual[i];
    sum[i] = value;
    squares += value * value;
  }
  return squares;
}

BIOMOE_ROW_KERNEL float sum_of_squares(const float* x, int64_t width) {
  float squares = 0.0f;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < width; ++i) squares += x[i] * x[i];
  return squares;
}

BIOMOE_ROW_KERNEL void scale_row(const float* input, const float* weight, float rstd, float* y,
                                 int64_t width) {
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) y[i] = weight[i] * (input[i] * rstd);
}

BIOMOE_ROW_KERNEL void add_partial(const float* partial, float* dweight, Range columns) {
#pragma omp simd
  for (int64_t i = columns.begin; i < columns.end; ++i) dweight[i] += partial[i];
}

struct BackwardRow {
  const float* dy;
  const float* sum;
  const float* weight;
  const float* dresidual;  // or null
  float rstd;
  float* dx;
  float* dweight;
};

// With n = sum * rstd and g = dy * weight:  dx = rstd * (g - n * mean(g * n)),  dweight += dy * n.
BIOMOE_ROW_KERNEL void backward_row(const BackwardRow& row, int64_t width) {
  const float* dy = row.dy;
  const float* sum = row.sum;
  const float* weight = row.weight;
  const float rstd = row.rstd;
  float* dx = row.dx;
  float* dweight = row.dweight;
  float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
  for (int64_t i = 0; i < width; ++i) {
    dot += dy[i] * weight[i] * sum[i];
    dweight[i] += dy[i] * (sum[i] * rstd);
  }
  const double mean = static_cast<double>(dot) * rstd / static_cast<double>(width);
  const float scale = static_cast<float>(mean * rstd * rstd);
  if (const float* dresidual = row.dresidual) {
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) dx[i] = dresidual[i] + (rstd * (dy[i] * weight[i]) - scale * sum[i]);
  } else {
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) dx[i] = rstd * (dy[i] * weight[i]) - scale * sum[i];
  }
}

}  // namespace

void rms_norm_forward(Context& ctx, const RmsNormForwardArgs& args) {
  const int64_t width = args.x_TD.shape[1];
  const float* x = args.x_TD.f32();
  const float* residual = args.residual_TD.f32();
  const float* weight = args.weight_D.f32();
  float* sum = args.sum_TD.f32();
  float* y = args.y_TD.f32();
  float* rstd_T = args.rstd_T.f32();
  parallel_ranges(ctx, args.x_TD.shape[0], min_rows_per_thread(width), [&](Range rows) {
    for (int64_t t = rows.begin; t < rows.end; ++t) {
      const float* x_row = x + t * args.x_TD.row_stride;
      const float* input = x_row;
      float squares = 0.0f;
      if (residual) {
        float* sum_row = sum + t * args.sum_TD.row_stride;
        squares = add_rows(x_row, residual + t * args.residual_TD.row_stride, sum_row, width);
        input = sum_row;
      } else {
        squares = sum_of_squares(x_row, width);
        if (sum && sum != x) std::copy_n(x_row, width, sum + t * args.sum_TD.row_stride);
      }
      const double mean = static_cast<double>(squares) / static_cast<double>(width);
      const float rstd = static_cast<float>(1.0 / std::sqrt(mean + args.eps));
      rstd_T[t] = rstd;
      scale_row(input, weight, rstd, y + t * args.y_TD.row_stride, width);
    }
  });
}

void rms_norm_backward(Context& ctx, const RmsNormBackwardArgs& args) {
  const int64_t tokens = args.dy_TD.shape[0];
  const int64_t width = args.dy_TD.shape[1];
  const int64_t rows = block_rows(tokens);
  const int64_t blocks = block_count(tokens);
  const ArenaScope scope(*ctx.scratch);
  float* partials = ctx.scratch->tensor(DType::kF32, Shape{blocks, width}).f32();
  const float* dresidual = args.dresidual_TD.f32();
  parallel_ranges(ctx, blocks, ceil_div(min_rows_per_thread(width), rows), [&](Range range) {
    for (int64_t block = range.begin; block < range.end; ++block) {
      float* partial = partials + block * width;
      std::fill_n(partial, width, 0.0f);
      for (int64_t t = block * rows; t < std::min(tokens, (block + 1) * rows); ++t) {
        backward_row({.dy = args.dy_TD.f32() + t * args.dy_TD.row_stride,
                      .sum = args.sum_TD.f32() + t * args.sum_TD.row_stride,
                      .weight = args.weight_D.f32(),
                      .dresidual = dresidual ? dresidual + t * args.dresidual_TD.row_stride : nullptr,
                      .rstd = args.rstd_T.f32()[t],
                      .dx = args.dx_TD.f32() + t * args.dx_TD.row_stride,
                      .dweight = partial},
                     width);
      }
    }
  });
  float* dweight = args.dweight_D.f32();
  parallel_ranges(ctx, width, min_rows_per_thread(blocks), [&](Range columns) {
    if (!args.accumulate) std::fill(dweight + columns.begin, dweight + columns.end, 0.0f);
    for (int64_t block = 0; block < blocks; ++block) {
      add_partial(partials + block * width, dweight, columns);
    }
  });
}

}  // namespace cpu
}  // namespace biomoe
