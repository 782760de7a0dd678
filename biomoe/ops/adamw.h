// AdamW (Loshchilov and Hutter, 2019) over flat arenas, and gradient clipping by the global norm.
#pragma once

#include <bit>
#include <cstdint>
#include <span>

#include "biomoe/core/context.h"
#include "biomoe/core/tensor_view.h"
#include "biomoe/ops/mx_weights.h"
#include "biomoe/ops/op_list.h"
#include "biomoe/quant/scaling.h"

namespace biomoe {

// A contiguous run of elements in flat arenas.
struct ArenaSegment {
  int64_t begin = 0;
  int64_t count = 0;
  bool decay = false;  // weight decay applies
};

// sums[i] = sum of x^2 over segments[i], in fp64, in an order that does not depend on the number of threads.
struct SumSquaresArgs {
  TensorView x_A;  // flat
  std::span<const ArenaSegment> segments;
  TensorView sums_S;  // f64 [segments], assigned
  // Empty, or one a segment: where it is there, its f32 values are added up instead, and x is not read. For
  // squares that were summed while x was made (GroupedGemmArgs::squares_P).
  std::span<const TensorView> partials{};
};

// Bytes of ctx.scratch that sum_squares takes.
size_t sum_squares_scratch_bytes(Device device, std::span<const ArenaSegment> segments);

// norm = sqrt(sum of sums); factor = min(1, max_norm / (norm + 1e-6)), or 1 where max_norm is 0, as
// torch.nn.utils.clip_grad_norm_; apply = 1 where norm and, if given, every one of `loss_sums` is finite,
// else 0.
struct ClipFactorArgs {
  TensorView sums_S;         // f64
  TensorView loss_sums_3{};  // f64, optional
  double max_norm = 0;       // 0: no clipping
  TensorView norm_1;         // f64, assigned
  TensorView factor_1;       // f64, assigned
  TensorView apply_1;        // f64, assigned
};

// Where AdamwArgs::update_5 holds what.
enum UpdateValue : int { kLr, kCorrection1, kCorrection2, kGradScale, kApply, kNumUpdateValues };

// An fp32 master as a bf16 weight and the 16 bits that are missing from it. The weight is the master rounded
// to the nearest, halves away from zero: to even, two masters would give the same pair. So the remainder
// tells whether the weight was rounded up (its top bit), and every master comes back bit for bit; a NaN as
// the quiet one.
struct SplitMaster {
  uint16_t weight = 0;
  uint16_t remainder = 0;
};
constexpr SplitMaster split_master(float master) {
  const auto bits = std::bit_cast<uint32_t>(master);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fc0, 0};
  return {static_cast<uint16_t>((bits + 0x8000u) >> 16), static_cast<uint16_t>(bits)};
}
constexpr float join_master(uint16_t weight, uint16_t remainder) {
  const uint32_t high = uint32_t{weight} - (remainder >> 15);
  return std::bit_cast<float>(high << 16 | remainder);
}

// Where the E4M3 codes of weights [E, O, I] in blocks of 128x128 are, with O and I multiples of 128: what
// quantize() writes of [E * O, I] in groups of O rows as data_RC, transposed_CR and scales_NB. Or where what
// MXFP8BlockScaling's codes of them stand for is, as write_mx_weights() writes it.
struct WeightCodes {
  ScaleRule rule = ScaleRule::kFloat;  // of fp32 scales
  TensorView codes_EOI{};              // u8
  TensorView transposed_EIO{};         // u8, optional
  TensorView scales_NB{};              // f32 [E (O / 128 + 1), I / 128]
  MxWeights mx{};                      // instead of them
  explicit operator bool() const { return codes_EOI || mx; }
};

// With lr, c1 = 1 - beta1^step, c2 = 1 - beta2^step, the clip factor and `apply` from update_5, for every
// element of every segment, g = grad * factor:
//   param -= lr * weight_decay * param  (where decay);  m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2;
//   param -= lr * (m / c1) / (sqrt(v / c2) + eps)
// and nothing at all where apply is 0. Arithmetic is fp32. Types: weights f32 alone; or weights bf16 with
// master f32, or with `remainder` (u16): both are updated to the same masters and weights, rounded as
// SplitMaster says; or weights bf16 alone, rounded to nearest even.
// Moments are f32 or bf16.
struct AdamwArgs {
  TensorView weights_A;      // flat arena, updated in place
  TensorView master_A{};     // f32, optional
  TensorView remainder_A{};  // u16, optional
  TensorView grad_A;         // read: f32 or bf16
  TensorView exp_avg_A;
  TensorView exp_avg_sq_A;
  std::span<const ArenaSegment> segments;
  // Empty, or one a segment, absent for some: where the codes of the segment's new weights, as they are
  // stored, are written in the same pass. The segment is the whole of [E, O, I], from a multiple of 8 on;
  // weights are bf16. On the GPU only.
  std::span<const WeightCodes> codes{};
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0;
  TensorView update_5;  // f64, indexed by UpdateValue
};

}  // namespace biomoe
