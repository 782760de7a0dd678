#include "biomoe/ops/quantize.h"

#include <algorithm>

#include "biomoe/ops/check_args.h"
#include "biomoe/ops/dispatch_device.h"
#include "biomoe/quant/mx_grid_scales.h"

namespace biomoe {
namespace {

void check_column_outputs(const char* op, const QuantizeArgs& args, const BlockGrid& grid) {
  constexpr int64_t kBlock = 128, kVectorBytes = 16;
  BM_CHECK(args.block == (BlockShape{1, kBlock}) && !is_mx(args.rule),
           "{}: codes by column go with blocks of 1x{} and fp32 scales", op, kBlock);
  BM_CHECK(!args.scales_NB && !args.amax_NB && !args.dequantized_RC,
           "{}: scales, amax and dequantized do not go with codes by column", op);
  BM_CHECK(grid.columns % kBlock == 0 && grid.rows % kVectorBytes == 0 && grid.group_rows % kBlock == 0,
           "{}: codes by column of {} rows in groups of {} and {} columns", op, grid.rows, grid.group_rows,
           grid.columns);
  for (const TensorView& view : {args.x_RC, args.data_RC, args.column_codes_CR}) {
    BM_CHECK(!view || (reinterpret_cast<uintptr_t>(view.data) % kVectorBytes == 0 &&
                       static_cast<size_t>(view.row_stride) * dtype_size(view.dtype) % kVectorBytes == 0),
             "{}: rows do not begin at multiples of {} bytes", op, kVectorBytes);
  }
  if (args.column_codes_CR) {
    check_tensor(op, "column_codes", args.column_codes_CR, DType::kU8, Shape{grid.columns, grid.rows});
  }
  if (args.column_scales_BC) {
    check_tensor(op, "column_scales", args.column_scales_BC, DType::kF32,
                 Shape{(grid.rows + kBlock - 1) / kBlock, grid.columns});
  }
}

void check_transposed(const char* op, const QuantizeArgs& args, const BlockGrid& grid) {
  if (!args.transposed_CR) return;
  constexpr int64_t kCodes = 16;
  const bool square = args.block == (BlockShape{128, 128});
  const int64_t group_rows = grid.group_rows > 0 ? grid.group_rows : grid.rows;
  if (square) {
    BM_CHECK(!args.offsets_E1, "{}: codes of blocks of 128x128 are transposed in groups of equal size", op);
  } else {
    BM_CHECK(args.block == (BlockShape{32, 1}) && is_mx(args.rule) && group_rows % kCodes == 0,
             "{}: codes are transposed of blocks of 128x128, or of MX blocks of 32x1 of rows that are a "
             "multiple of {}, not of {}x{} of {} rows",
             op, kCodes, args.block.rows, args.block.columns, group_rows);
  }
  const int64_t groups = grid.group_rows > 0 ? grid.groups : 1;
  check_tensor(op, "transposed", args.transposed_CR, DType::kU8, Shape{groups * grid.columns, group_rows});
}

void check_mx_scales(const char* op, const QuantizeArgs& args, const BlockGrid& grid) {
  if (!args.mx_scales_S) return;
  BM_CHECK(is_mx(args.rule) && args.format == Fp8Format::kE4M3 &&
               (args.block == (BlockShape{1, 32}) || args.block == (BlockShape{32, 1})),
           "{}: mx_scales are of MX blocks of 1x32 or 32x1 of E4M3", op);
  check_tensor(op, "mx_scales", args.mx_scales_S, DType::kU8, Shape{MxGridScales(grid).bytes()});
}

}  // namespace

BlockGrid block_grid(const QuantizeArgs& args) {
  BlockGrid grid{.rows = args.x_RC.shape[0], .columns = args.x_RC.shape[1], .block = args.block};
  if (args.offsets_E1) {
    grid.offsets = args.offsets_E1.i64();
    grid.groups = args.offsets_E1.shape[0] - 1;
  } else if (args.group_rows > 0) {
    grid.group_rows = args.group_rows;
    grid.groups = grid.rows / args.group_rows;
  }
  return grid;
}

size_t quantize_scratch_bytes(Device device, int64_t groups) {
  return device == Device::kCpu ? 0 : align_up(static_cast<size_t>(groups) * sizeof(float));
}

void quantize(Context& ctx, const QuantizeArgs& args) {
  constexpr const char* kOp = "quantize";
  check_rank(kOp, "x", args.x_RC, 2);
  check_compute_type(kOp, "x", args.x_RC, ctx.device);
  const Shape& shape = args.x_RC.shape;
  check_tensor(kOp, "x", args.x_RC, args.x_RC.dtype, shape, Layout::kRows);
  BM_CHECK(std::find(kBlockShapes.begin(), kBlockShapes.end(), args.block) != kBlockShapes.end(),
           "{}: there are no blocks of {}x{}", kOp, args.block.rows, args.block.columns);
  BM_CHECK(
      args.group_rows == 0 || (args.group_rows > 0 && shape[0] % args.group_rows == 0 && !args.offsets_E1),
      "{}: {} rows in groups of {}", kOp, shape[0], args.group_rows);
  if (args.offsets_E1) {
    check_rank(kOp, "offsets", args.offsets_E1, 1);
    BM_CHECK(args.offsets_E1.shape[0] >= 1, "{}: offsets is empty, expected the groups' borders", kOp);
    check_tensor(kOp, "offsets", args.offsets_E1, DType::kI64, args.offsets_E1.shape);
  }
  const BlockGrid grid = block_grid(args);
  const Shape blocks{grid.bands(), grid.block_columns()};
  if (args.data_RC) check_tensor(kOp, "data", args.data_RC, DType::kU8, shape, Layout::kRows);
  if (args.scales_NB) {
    check_tensor(kOp, "scales", args.scales_NB, is_mx(args.rule) ? DType::kU8 : DType::kF32, blocks);
  }
  if (args.row_scales_BR) {
    BM_CHECK(args.block.rows == 1 && !is_mx(args.rule), "{}: scales by row are fp32, of blocks of one row",
             kOp);
    check_tensor(kOp, "row_scales", args.row_scales_BR, DType::kF32,
                 Shape{grid.block_columns(), row_scales_stride(shape[0])});
  }
  check_transposed(kOp, args, grid);
  check_mx_scales(kOp, args, grid);
  if (args.column_codes_CR || args.column_scales_BC) check_column_outputs(kOp, args, grid);
  if (args.amax_NB) check_tensor(kOp, "amax", args.amax_NB, DType::kF32, blocks);
  if (args.dequantized_RC) {
    check_tensor(kOp, "dequantized", args.dequantized_RC, args.x_RC.dtype, shape, Layout::kRows);
  }
  if (args.rule == ScaleRule::kGiven) {
    BM_CHECK(args.block == (BlockShape{0, 0}), "{}: scales are given for whole groups only", kOp);
    check_tensor(kOp, "given_scales", args.given_scales_N, DType::kF32, Shape{grid.bands()});
  }
  BIOMOE_RUN_ON_DEVICE(quantize, ctx, args);
}

void update_delayed_scales(Context& ctx, const UpdateDelayedScalesArgs& args) {
  constexpr const char* kOp = "update_delayed_scales";
  check_rank(kOp, "amax", args.amax_HN, 2);
  const int64_t tensors = args.amax_HN.shape[1];
  BM_CHECK(args.amax_HN.shape[0] >= 1, "{}: a history of no steps", kOp);
  BM_CHECK(args.margin >= -64 && args.margin <= 64, "{}: margin is {}, expected -64 to 64", kOp, args.margin);
  check_tensor(kOp, "amax", args.amax_HN, DType::kF32, args.amax_HN.shape);
  check_tensor(kOp, "scales", args.scales_N, DType::kF32, Shape{tensors});
  check_tensor(kOp, "formats", args.formats_N, DType::kU8, Shape{tensors});
  BIOMOE_RUN_ON_DEVICE(update_delayed_scales, ctx, args);
}

}  // namespace biomoe
