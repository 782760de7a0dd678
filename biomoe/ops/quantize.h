// Quantisation to 8 bits with a scale a block: MXFP8, block scaling and per-tensor scaling are block shapes
// and scale rules of one operation.
#pragma once

#include <array>

#include "biomoe/core/context.h"
#include "biomoe/core/tensor_view.h"
#include "biomoe/ops/op_list.h"
#include "biomoe/ops/scaled_codes.h"
#include "biomoe/quant/block_grid.h"
#include "biomoe/quant/scaling.h"

namespace biomoe {

// The shapes of blocks that there are kernels for. MXFP8: 1x32 where the product sums over columns, 32x1
// where it sums over rows. Block scaling: 1x128, 128x1, 128x128. Per tensor: 0x0, one block a group.
inline constexpr std::array<BlockShape, 6> kBlockShapes{
    {{1, 32}, {32, 1}, {1, 128}, {128, 1}, {128, 128}, {0, 0}}};

// Quantises x; the blocks and groups are those of BlockGrid. Of the outputs any may be absent; rows outside
// of every group are neither read nor written. x and dequantized may be the same memory.
struct QuantizeArgs {
  TensorView x_RC;  // f32; on the GPU f32 or bf16
  Fp8Format format = Fp8Format::kE4M3;
  ScaleRule rule = ScaleRule::kMxUp;
  BlockShape block{};
  TensorView offsets_E1{};  // optional i64: the groups
  int64_t group_rows = 0;   // optional, without offsets: groups of so many rows, a divisor of R
  TensorView data_RC{};     // u8 codes, assigned
  TensorView scales_NB{};   // N = bands(), B = block_columns(). MX rules: u8 E8M0, assigned; others: f32,
                            // what a code is multiplied with to read it, assigned; rows of bands without
                            // rows are not written
  // f32 [B, row_scales_stride(R)], assigned where rows are in a group: the same for blocks of one row, with
  // the scale of block b of row r at [b, r]. Not of MX rules.
  TensorView row_scales_BR{};
  // u8 [groups * C, rows of a group], assigned: the codes of each group, transposed. For blocks of 128x128 in
  // groups of equal size. For MX blocks of 32x1 also of groups by offsets, as u8 [C, R]: assigned where rows
  // are in a group; rows (of a group, if of equal size) are a multiple of 16, offsets of 32.
  TensorView transposed_CR{};
  // u8 [MxGridScales(block_grid(args)).bytes()], assigned, with zeros where no block has a scale: the scales
  // of MX blocks of 1x32 or 32x1, E4M3, as Blackwell's products of such codes read them.
  TensorView mx_scales_S{};
  // For blocks of 1x128, of a rule that is not MX's, in groups whose borders are all multiples of 128 (R may
  // be more than the last): what blocks of 128x1 would give, from the same reading of x. Of the other outputs
  // only data_RC and row_scales_BR go with them. C is a multiple of 128, R of 16; rows of x, data_RC and the
  // codes begin at 16-byte addresses.
  TensorView column_codes_CR{};  // u8, transposed, assigned where rows are in a group
  // f32 [ceil(R / 128), C], assigned where block b has rows in a group: what a code of rows
  // [128 b, 128 b + 128) of column c is multiplied with, at [b, c].
  TensorView column_scales_BC{};
  TensorView given_scales_N{};  // f32, read by rule kGiven (blocks 0x0): what elements are multiplied with
  TensorView amax_NB{};         // f32: raised to the largest magnitude of the block, NaN aside
  TensorView dequantized_RC{};  // of x's type, assigned: what the codes stand for, rounded to that type
};

// The blocks that `args` asks for. On the GPU its offsets are device memory.
BlockGrid block_grid(const QuantizeArgs& args);

// Bytes of ctx.scratch that quantize takes.
size_t quantize_scratch_bytes(Device device, int64_t groups);

// amax_HN is a history of H steps of N tensors' amax, of which row 0 is the step that ends. The next scale of
// each tensor is found from the largest of the history, or from row 0 (most_recent); then row h becomes what
// row h + 1 was, the last row what row 0 was, and row 0 becomes 0 (see docs/numerics.md).
struct UpdateDelayedScalesArgs {
  TensorView amax_HN;    // f32, updated
  TensorView scales_N;   // f32, updated
  TensorView formats_N;  // u8: Fp8Format of each tensor
  int64_t margin = 0;
  bool most_recent = false;
  bool power_of_two = false;
};

}  // namespace biomoe
