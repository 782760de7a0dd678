#include "biomoe/ops/quantize.h"

#include <algorithm>

#include "biomoe/backend/cpu/parallel.h"
#include "biomoe/backend/cpu/row_kernel.h"
#include "biomoe/core/error.h"
#include "biomoe/quant/mx_grid_scales.h"

namespace biomoe::cpu {
namespace {

constexpr int64_t kStrip = 128;  // columns at a time; whole blocks of any shape

// Of a strip: one value a column, so that the loops over elements are the same for all shapes of blocks.
struct Strip {
  float amax[kStrip];
  float multiply[kStrip];
  float inverse[kStrip];
};

BIOMOE_ROW_KERNEL void raise_amax(const float* x, float* amax, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const float magnitude = std::bit_cast<float>(std::bit_cast<uint32_t>(x[i]) & 0x7fffffffu);
    amax[i] = magnitude > amax[i] ? magnitude : amax[i];  // false for NaN
  }
}

template <Fp8Format kFormat>
BIOMOE_ROW_KERNEL void encode_row(const float* x, const float* multiply, uint8_t* data, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) data[i] = fp8::encode(x[i] * multiply[i], kFormat);
}

template <Fp8Format kFormat>
BIOMOE_ROW_KERNEL void round_row(const float* x, const Strip& strip, float* y, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    y[i] = fp8::decode(fp8::encode(x[i] * strip.multiply[i], kFormat), kFormat) * strip.inverse[i];
  }
}

// One band of blocks at a time.
class BandQuantizer {
 public:
  BandQuantizer(const QuantizeArgs& args, const BlockGrid& grid) : args_(args), grid_(grid) {}

  void run(int64_t index) const {
    const BlockGrid::Band band = grid_.band(index);
    if (band.row_begin == band.row_end || grid_.columns == 0) return;
    Strip strip;
    if (grid_.block.columns == 0) {
      std::fill(std::begin(strip.amax), std::end(strip.amax), 0.0f);
      for (int64_t c = 0; c < grid_.columns; c += kStrip) add_amax(band, c, strip);
      set_scale(index, band, 0, strip, 0, kStrip);
    }
    for (int64_t c = 0; c < grid_.columns; c += kStrip) {
      if (grid_.block.columns > 0) {
        std::fill(std::begin(strip.amax), std::end(strip.amax), 0.0f);
        add_amax(band, c, strip);
        const int64_t width = std::min(kStrip, grid_.columns - c);
        for (int64_t i = 0; i < width; i += grid_.block.columns) {
          set_scale(index, band, (c + i) / grid_.block.columns, strip, i, i + grid_.block.columns);
        }
      }
      write(band, c, strip);
    }
  }

 private:
  const float* row(int64_t r) const { return args_.x_RC.f32() + r * args_.x_RC.row_stride; }

  void add_amax(const BlockGrid::Band& band, int64_t column, Strip& strip) const {
    const int64_t width = std::min(kStrip, grid_.columns - column);
    for (int64_t r = band.row_begin; r < band.row_end; ++r) raise_amax(row(r) + column, strip.amax, width);
  }

  void set_scale(int64_t index, const BlockGrid::Band& band, int64_t block, Strip& strip, int64_t begin,
                 int64_t end) const {
    const float amax = *std::max_element(strip.amax + begin, strip.amax + end);
    const BlockScale scale = args_.rule == ScaleRule::kGiven
                                 ? given_block_scale(args_.given_scales_N.f32()[index])
                                 : block_scale(amax, args_.format, args_.rule);
    std::fill(strip.multiply + begin, strip.multiply + end, scale.multiply);
    std::fill(strip.inverse + begin, strip.inverse + end, scale.inverse);
    const int64_t at = index * grid_.block_columns() + block;
    if (args_.amax_NB) args_.amax_NB.f32()[at] = std::max(args_.amax_NB.f32()[at], amax);
    if (args_.row_scales_BR) {
      args_.row_scales_BR.f32()[block * args_.row_scales_BR.row_stride + band.row_begin] = scale.inverse;
    }
    if (args_.mx_scales_S) {
      const int64_t offset = MxGridScales(grid_).offset(band.row_begin, block);
      static_cast<uint8_t*>(args_.mx_scales_S.data)[offset] = scale.e8m0;
    }
    if (!args_.scales_NB) return;
    if (is_mx(args_.rule)) {
      static_cast<uint8_t*>(args_.scales_NB.data)[at] = scale.e8m0;
    } else {
      args_.scales_NB.f32()[at] = scale.inverse;
    }
  }

  void write(const BlockGrid::Band& band, int64_t column, const Strip& strip) const {
    const int64_t width = std::min(kStrip, grid_.columns - column);
    const bool e4m3 = args_.format == Fp8Format::kE4M3;
    for (int64_t r = band.row_begin; r < band.row_end; ++r) {
      const float* x = row(r) + column;
      if (args_.data_RC) {
        uint8_t* data = static_cast<uint8_t*>(args_.data_RC.data) + r * args_.data_RC.row_stride + column;
        e4m3 ? encode_row<Fp8Format::kE4M3>(x, strip.multiply, data, width)
             : encode_row<Fp8Format::kE5M2>(x, strip.multiply, data, width);
      }
      if (args_.transposed_CR) write_transposed(band.group, r, column, width, strip.multiply);
      if (args_.dequantized_RC) {
        float* y = args_.dequantized_RC.f32() + r * args_.dequantized_RC.row_stride + column;
        e4m3 ? round_row<Fp8Format::kE4M3>(x, strip, y, width)
             : round_row<Fp8Format::kE5M2>(x, strip, y, width);
      }
    }
  }

  void write_transposed(int64_t group, int64_t row_index, int64_t column, int64_t width,
                        const float* multiply) const {
    const int64_t rows = args_.transposed_CR.shape[1];
    const int64_t matrix = grid_.offsets ? 0 : group;  // groups by offsets are parts of one
    uint8_t* to = static_cast<uint8_t*>(args_.transposed_CR.data) + (matrix * grid_.columns + column) * rows +
                  row_index - grid_.group_begin(matrix);
    const float* x = row(row_index) + column;
    for (int64_t i = 0; i < width; ++i) to[i * rows] = fp8::encode(x[i] * multiply[i], args_.format);
  }

  const QuantizeArgs& args_;
  const BlockGrid& grid_;
};

// The outputs by column are those of blocks of 128x1 of the rows that are in a group: these begin with a
// block in every group, as the matrix does.
void quantize_columns(Context& ctx, const QuantizeArgs& args, const BlockGrid& groups) {
  constexpr int64_t kBlock = 128;
  for (int64_t g = 0; g < groups.groups; ++g) {
    BM_CHECK(
        groups.group_begin(g) % kBlock == 0 && (!groups.offsets || groups.group_begin(g + 1) % kBlock == 0),
        "quantize: group {} of codes by column is of rows {} to {}, expected multiples of {}", g,
        groups.group_begin(g), groups.group_begin(g + 1), kBlock);
  }
  QuantizeArgs columns;
  columns.x_RC = args.x_RC.rows(0, groups.group_begin(groups.groups));
  columns.format = args.format;
  columns.rule = args.rule;
  columns.block = {kBlock, 1};
  const BlockGrid grid = block_grid(columns);
  if (args.column_scales_BC) columns.scales_NB = args.column_scales_BC.rows(0, grid.bands());
  columns.transposed_CR = args.column_codes_CR;
  const BandQuantizer quantizer(columns, grid);
  parallel_items(ctx, grid.bands(), [&](int64_t band, int) { quantizer.run(band); });
}

}  // namespace

void quantize(Context& ctx, const QuantizeArgs& args) {
  const BlockGrid grid = block_grid(args);
  BM_CHECK(grid.group_begin(0) == 0 && grid.group_begin(grid.groups) <= grid.rows,
           "quantize: groups from row {} to {}, expected 0 to at most {}", grid.group_begin(0),
           grid.group_begin(grid.groups), grid.rows);
  for (int64_t g = 0; g < grid.groups; ++g) {
    BM_CHECK(grid.group_begin(g) <= grid.group_begin(g + 1), "quantize: group {} ends before it begins", g);
  }
  if (args.block.rows == 32 && (args.transposed_CR || args.mx_scales_S) && grid.offsets) {
    for (int64_t g = 0; g <= grid.groups; ++g) {
      BM_CHECK(grid.group_begin(g) % 32 == 0,
               "quantize: MX blocks of 32x1 that are transposed begin at row {}", grid.group_begin(g));
    }
  }
  if (args.mx_scales_S) {
    auto* scales = static_cast<uint8_t*>(args.mx_scales_S.data);
    std::fill(scales, scales + args.mx_scales_S.num_elements(), uint8_t{0});
  }
  if (args.column_codes_CR || args.column_scales_BC) quantize_columns(ctx, args, grid);
  const BandQuantizer quantizer(args, grid);
  parallel_items(ctx, grid.bands(), [&](int64_t band, int) { quantizer.run(band); });
}

void update_delayed_scales(Context&, const UpdateDelayedScalesArgs& args) {
  const int64_t steps = args.amax_HN.shape[0], tensors = args.amax_HN.shape[1];
  for (int64_t n = 0; n < tensors; ++n) {
    float* history = args.amax_HN.f32() + n;
    float amax = history[0];
    const float newest = history[0];
    for (int64_t h = 1; h < steps; ++h) {
      if (!args.most_recent) amax = std::max(amax, history[h * tensors]);
      history[(h - 1) * tensors] = history[h * tensors];
    }
    history[(steps - 1) * tensors] = newest;
    history[0] = 0.0f;
    const auto format = static_cast<Fp8Format>(static_cast<const uint8_t*>(args.formats_N.data)[n]);
    float& scale = args.scales_N.f32()[n];
    scale = delayed_scale(amax, scale, format, static_cast<int>(args.margin), args.power_of_two);
  }
}

}  // namespace biomoe::cpu
