#include "biomoe/moe/split_sequential.h"

#include <algorithm>
#include <numeric>

#include "biomoe/core/error.h"
#include "biomoe/ops/cuda_sizes.h"
#include "biomoe/ops/device.h"
#include "biomoe/ops/dispatch.h"
#include "biomoe/quant/compact_bf16.h"

namespace biomoe {
SplitSequential::SplitSequential(Context& ctx, DType type, const Sequential& layers, int64_t max_rows)
    : ctx_(ctx),
      type_(type),
      layers_(layers),
      max_rows_(max_rows),
      row_alignment_(ctx.device == Device::kCpu ? 1 : cuda::kExpertRowAlignment) {
  BM_CHECK(max_rows >= 0, "SplitSequential: room for {} rows", max_rows);
  mirror_ = MirroredArena(ctx.device, planned_bytes([&](TensorAllocator& to) { lay_out_rows(to); }),
                          "borders of splits");
  row_tables_ = lay_out_rows(mirror_);
  arena_ = Arena(planned_bytes([&](TensorAllocator& to) { lay_out_memory(to); }), "rows of experts",
                 device_memory(ctx.device));
  lay_out_memory(arena_);
}

SplitSequential::Rows SplitSequential::lay_out_rows(TensorAllocator& allocator) const {
  const int64_t experts = layers_.num_experts();
  Rows rows;
  rows.offsets_E1 = allocator.tensor(DType::kI64, {experts + 1});
  if (direct()) return rows;
  rows.rows_E = allocator.tensor(DType::kI32, {experts});
  rows.row_of_slot_N = allocator.tensor(DType::kI32, {max_rows_});
  rows.slot_of_row_R = allocator.tensor(DType::kI32, {row_capacity(max_rows_, experts, row_alignment_)});
  return rows;
}

void SplitSequential::lay_out_memory(TensorAllocator& allocator) {
  const int64_t capacity = row_capacity(max_rows_, layers_.num_experts(), row_alignment_);
  for (size_t i = 0; i + 1 < layers_.num_layers(); ++i) {
    memory_.hidden[i] = allocator.tensor(type_, {capacity, layers_.width_after(i)});
    memory_.gradient[i] = memory_.hidden[i];
    if (!layers_.codes_at(i)) continue;
    memory_.kept[i] =
        allocator.tensor(DType::kU8, {capacity, CompactLayout::row_bytes(layers_.width_after(i + 1))});
  }
  if (direct()) return;
  in_RI_ = allocator.tensor(type_, {capacity, layers_.in_features()});
  out_RO_ = allocator.tensor(type_, {capacity, layers_.out_features()});
  scales_R_ = allocator.tensor(DType::kF32, {capacity});
  dscales_R_ = allocator.tensor(DType::kF32, {capacity});
}

void SplitSequential::set_splits(std::span<const int64_t> split_sizes) {
  const int64_t experts = layers_.num_experts();
  BM_CHECK(static_cast<int64_t>(split_sizes.size()) == experts,
           "SplitSequential: {} split sizes for {} experts", split_sizes.size(), experts);
  if (!direct()) device_wait_sync(ctx_);  // the host's copy may still be on its way from the last call
  int64_t* offsets = mirror_.host(row_tables_.offsets_E1).i64();
  offsets[0] = 0;
  int64_t slot = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t size = split_sizes[static_cast<size_t>(e)];
    BM_CHECK(size >= 0 && size <= rows_ - slot, "SplitSequential: split sizes do not add up to the {} rows",
             rows_);
    const int64_t padded = (size + row_alignment_ - 1) / row_alignment_ * row_alignment_;
    offsets[e + 1] = offsets[e] + padded;
    if (!direct()) {
      mirror_.host(row_tables_.rows_E).i32()[e] = static_cast<int32_t>(size);
      int32_t* slots = mirror_.host(row_tables_.slot_of_row_R).i32() + offsets[e];
      std::iota(slots, slots + size, static_cast<int32_t>(slot));
      std::fill(slots + size, slots + padded, -1);
      int32_t* places = mirror_.host(row_tables_.row_of_slot_N).i32() + slot;
      std::iota(places, places + size, static_cast<int32_t>(offsets[e]));
    }
    slot += size;
  }
  BM_CHECK(slot == rows_, "SplitSequential: split sizes add up to {}, expected the {} rows", slot, rows_);
  padded_rows_ = row_capacity(rows_, experts, row_alignment_);
  if (direct()) return;
  int32_t* slots = mirror_.host(row_tables_.slot_of_row_R).i32();
  std::fill(slots + offsets[experts], slots + padded_rows_, -1);
  mirror_.push(ctx_);
}

ExpertRows SplitSequential::expert_rows() const {
  ExpertRows rows{.offsets_E1 = row_tables_.offsets_E1, .rows_E = row_tables_.rows_E};
  if (!direct()) rows.offsets_host_E1 = mirror_.host(row_tables_.offsets_E1);
  return rows;
}

SequentialMemory SplitSequential::memory() const {
  SequentialMemory memory;
  for (size_t i = 0; i + 1 < layers_.num_layers(); ++i) {
    memory.hidden[i] = memory.gradient[i] = memory_.hidden[i].rows(0, padded_rows_);
    if (memory_.kept[i]) memory.kept[i] = memory_.kept[i].rows(0, padded_rows_);
  }
  return memory;
}

void SplitSequential::forward(TensorView x_NI, std::span<const int64_t> split_sizes, TensorView scales_N,
                              TensorView y_NO) {
  BM_CHECK(x_NI.shape.rank() == 2 && x_NI.shape[1] == layers_.in_features() && x_NI.dtype == type_,
           "SplitSequential: x is {} {}, expected {} [rows, {}]", dtype_name(x_NI.dtype), x_NI.shape.str(),
           dtype_name(type_), layers_.in_features());
  BM_CHECK(x_NI.shape[0] <= max_rows_, "SplitSequential: {} rows, and memory for {}", x_NI.shape[0],
           max_rows_);
  rows_ = x_NI.shape[0];
  set_splits(split_sizes);
  if (direct()) {
    layers_.forward(ctx_, expert_rows(), x_NI, scales_N, memory(), y_NO);
    return;
  }
  const bool scaled = layers_.has_scales();
  const TensorView slots = row_tables_.slot_of_row_R.rows(0, padded_rows_);
  permute(ctx_, {.x_TD = x_NI,
                 .slot_of_row_R = slots,
                 .y_RD = in_RI_.rows(0, padded_rows_),
                 .values_N = scaled ? scales_N : TensorView(),
                 .y_values_R = scaled ? scales_R_.rows(0, padded_rows_) : TensorView()});
  layers_.forward(ctx_, expert_rows(), in_RI_.rows(0, padded_rows_), scales_R_.rows(0, padded_rows_),
                  memory(), out_RO_.rows(0, padded_rows_));
  unpermute(ctx_, {.y_RD = out_RO_.rows(0, padded_rows_),
                   .row_of_slot_N = row_tables_.row_of_slot_N.rows(0, rows_),
                   .x_TD = y_NO,
                   .y_values_R = {},
                   .values_N = {}});
}

void SplitSequential::backward(const Gradients& args) {
  BM_CHECK(args.dy_NO.shape == (Shape{rows_, layers_.out_features()}),
           "SplitSequential: dy is {}, the last forward had {} rows", args.dy_NO.shape.str(), rows_);
  if (direct()) {
    layers_.backward(ctx_, expert_rows(), memory(),
                     {.x_RI = args.x_NI,
                      .dy_RO = args.dy_NO,
                      .dx_RI = args.dx_NI,
                      .scales_R = args.scales_N,
                      .dscales_R = args.dscales_N,
                      .accumulate = args.accumulate});
    return;
  }
  const bool scaled = layers_.has_scales() && args.dscales_N;
  const TensorView padded_dy = out_RO_.rows(0, padded_rows_), padded_x = in_RI_.rows(0, padded_rows_);
  permute(ctx_, {.x_TD = args.dy_NO,
                 .slot_of_row_R = row_tables_.slot_of_row_R.rows(0, padded_rows_),
                 .y_RD = padded_dy,
                 .values_N = {},
                 .y_values_R = {}});
  layers_.backward(ctx_, expert_rows(), memory(),
                   {.x_RI = padded_x,
                    .dy_RO = padded_dy,
                    .dx_RI = padded_x,
                    .scales_R = scales_R_.rows(0, padded_rows_),
                    .dscales_R = dscales_R_.rows(0, padded_rows_),
                    .accumulate = args.accumulate});
  if (!args.dx_NI) return;
  unpermute(ctx_, {.y_RD = padded_x,
                   .row_of_slot_N = row_tables_.row_of_slot_N.rows(0, rows_),
                   .x_TD = args.dx_NI,
                   .y_values_R = scaled ? dscales_R_.rows(0, padded_rows_) : TensorView(),
                   .values_N = scaled ? args.dscales_N : TensorView()});
}

}  // namespace biomoe
