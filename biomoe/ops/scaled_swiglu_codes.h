// SwiGLU between products of codes, without its results being written as such: what scaled_swiglu_forward and
// scaled_swiglu_backward store of BF16 and quantize() then makes of it, bit for bit. On a GPU of any kind;
// the CPU multiplies no codes and refuses.
#pragma once

#include "biomoe/core/tensor_view.h"
#include "biomoe/ops/op_list.h"
#include "biomoe/ops/scaled_codes.h"
#include "biomoe/quant/scaling.h"

namespace biomoe {

// gate_up (bf16), probs (f32), act and interleave are those of ops/scaled_swiglu.h; interleave is
// cuda::kGateUpInterleave. What forward keeps (u8) is gate and up as quant/compact_bf16.h has them, in
// CompactLayout::row_bytes(F) bytes a row; backward works from what comes back of that. F is a multiple of
// 128. Codes are E4M3 with scales of `rule`, which is not MX's. Borders of groups are multiples of 128; rows
// from offsets[E] on are neither read nor written. Rows of matrices lie one after the other and begin at
// 16-byte addresses.
struct ScaledSwigluCodesForwardArgs {
  TensorView gate_up_R2F;
  TensorView probs_R;
  TensorView offsets_E1;         // i64
  TensorView act_codes_RF;       // u8, assigned: of blocks of 1x128, as QuantizeArgs::data_RC
  TensorView act_row_scales_BR;  // f32, assigned: as QuantizeArgs::row_scales_BR
  TensorView kept_RC{};          // assigned; absent: nothing is kept
  ScaleRule rule = ScaleRule::kPowerOfTwo;
  int64_t interleave = 0;
};

// Codes and scales of columns are those of QuantizeArgs, of blocks of 128x1; R is a multiple of 16.
struct ScaledSwigluCodesBackwardArgs {
  TensorView dact_RF;  // read, then overwritten with partial sums of dprobs
  TensorView kept_RC;
  TensorView probs_R;
  TensorView offsets_E1;                  // i64
  TensorView dgate_up_codes_R2F;          // u8, assigned; as the next three
  TensorView dgate_up_row_scales_BR;      // f32
  TensorView dgate_up_column_codes_2FR;   // u8, transposed
  TensorView dgate_up_column_scales_B2F;  // f32
  TensorView act_column_codes_FR;         // u8, transposed, assigned: of what forward gave
  TensorView act_column_scales_BF;        // f32, assigned
  TensorView dprobs_R;                    // f32, assigned; summed in an order that F determines
  ScaleRule rule = ScaleRule::kPowerOfTwo;
  int64_t interleave = 0;
};

}  // namespace biomoe
