// A Sequential for rows that lie one expert after the other with nothing between, told by the sizes of the
// splits: any sizes will do, whatever the device's kernels want of their rows.
#pragma once

#include <span>
#include <string>

#include "biomoe/core/arena.h"
#include "biomoe/moe/sequential.h"
#include "biomoe/ops/mirrored_arena.h"

namespace biomoe {

// Holds the layers, what forward leaves for backward, and on a GPU padded copies of the rows. N rows a call.
class SplitSequential {
 public:
  // Reserves memory of ctx's device for max_rows rows of `type`. ctx must outlive the object.
  SplitSequential(Context& ctx, DType type, const Sequential& layers, int64_t max_rows);

  const Sequential& layers() const { return layers_; }
  std::string describe() const { return layers_.describe(); }

  // y = layers(x), assigned: the first split_sizes[0] rows by expert 0, and so on. scales_N (f32) is read
  // where there is a ScaledSwiGLU. Throws failure when the sizes do not add up to x's rows, or there are more
  // rows than max_rows. On a GPU waits for what was given to it before.
  void forward(TensorView x_NI, std::span<const int64_t> split_sizes, TensorView scales_N, TensorView y_NO);

  struct Gradients {
    TensorView x_NI, scales_N;  // what forward read, unchanged
    TensorView dy_NO;
    TensorView dx_NI{};       // assigned; may be x; absent: not computed
    TensorView dscales_N{};   // f32, assigned; needed where there is a ScaledSwiGLU
    bool accumulate = false;  // add to the weights' gradients instead of assigning them
  };
  // Of the last forward, once.
  void backward(const Gradients& args);

 private:
  // What the host works out and the device reads.
  struct Rows {
    TensorView offsets_E1, rows_E, row_of_slot_N, slot_of_row_R;
  };
  Rows lay_out_rows(TensorAllocator& allocator) const;
  void lay_out_memory(TensorAllocator& allocator);
  void set_splits(std::span<const int64_t> split_sizes);
  ExpertRows expert_rows() const;
  SequentialMemory memory() const;  // of as many rows as this call has
  bool direct() const { return ctx_.device == Device::kCpu; }

  Context& ctx_;
  DType type_;
  Sequential layers_;
  int64_t max_rows_ = 0, row_alignment_ = 1;
  int64_t rows_ = 0, padded_rows_ = 0;  // of the last forward
  MirroredArena mirror_;
  Arena arena_;
  Rows row_tables_;
  SequentialMemory memory_;
  TensorView in_RI_, out_RO_, scales_R_, dscales_R_;  // padded rows; unused on the CPU
};

}  // namespace biomoe
