// Sequential: layers over rows in expert order, run one after the other, where GroupedLinear -> ScaledSwiGLU
// -> GroupedLinear becomes one fused operation forward and one backward. In BF16 the activation is in the
// epilogues of the products. Where both layers are native it is a pass of its own that reads and writes what
// the products do as codes: what it computes never lies in memory in BF16.
#pragma once

#include <array>
#include <initializer_list>
#include <optional>
#include <string>
#include <variant>

#include "biomoe/core/context.h"
#include "biomoe/moe/grouped_linear.h"

namespace biomoe {

// y[r, f] = silu(gate) * up * scales[r]: SwiGLU with the rows' routing probabilities as scales. Where gate
// and up columns lie is in ops/scaled_swiglu.h.
struct ScaledSwiGLU {
  int64_t interleave = 0;
  std::string str() const;  // "ScaledSwiGLU(interleave 0)"
};

using ExpertLayer = std::variant<GroupedLinear, ScaledSwiGLU>;

enum class Fusion : uint8_t {
  kAuto,      // where it is possible
  kOff,       // never
  kRequired,  // or an error
};

// Why these three layers cannot run as one operation of `device` that computes in `type`; "" where they can.
std::string fused_mlp_obstacle(Device device, DType type, const GroupedLinear& gate_up,
                               const ScaledSwiGLU& activation, const GroupedLinear& down);
// Of these only what a GPU of this compute capability (10 * major + minor; 0 for the CPU), which need not be
// here, lacks for experts of this width. "" where nothing is lacking.
std::string fused_mlp_device_obstacle(int compute_capability, int64_t expert_width, int64_t interleave);

// Of one call and its backward; all views of [R, ...] with room for every row.
struct SequentialMemory {
  static constexpr size_t kMaxHidden = 7;
  // Output of each layer but the last. Kept from forward to backward, which may overwrite it. That of a
  // ScaledSwiGLU which passes codes on (see Sequential::codes_at) is not there: it may be absent.
  std::array<TensorView, kMaxHidden> hidden{};
  // Where codes are passed on (see Sequential::codes_at), at the place of the first of the three layers: u8
  // of [R, CompactLayout::row_bytes()], what is kept of its output, which need not last until backward then.
  // Absent where there is no backward.
  std::array<TensorView, kMaxHidden> kept{};
  // Gradient of each of them; may be the hidden output itself. Under a ScaledSwiGLU it always is, or is not
  // there where the ScaledSwiGLU passes codes on.
  std::array<TensorView, kMaxHidden> gradient{};
};

struct SequentialBackward {
  TensorView x_RI;  // what forward read
  TensorView dy_RO;
  TensorView dx_RI{};  // assigned; may be x itself; absent: not computed
  TensorView scales_R{};
  TensorView dscales_R{};   // f32, assigned; needed where there is a ScaledSwiGLU
  bool accumulate = false;  // add to the weights' gradients instead of assigning them
};

// A view of layers, made and copied without allocating.
class Sequential {
 public:
  static constexpr size_t kMaxLayers = SequentialMemory::kMaxHidden + 1;

  // `type` is what activations are computed in on `device`. Throws user_error when the layers do not fit each
  // other, or when fusion is required and there is nothing to fuse or the device cannot: the message says
  // what to change.
  Sequential(Device device, DType type, std::initializer_list<ExpertLayer> layers,
             Fusion fusion = Fusion::kAuto);

  size_t num_layers() const { return count_; }
  const ExpertLayer& layer(size_t i) const { return layers_[i]; }
  int64_t num_experts() const;
  int64_t in_features() const;
  int64_t out_features() const { return width_after(count_ - 1); }
  int64_t width_after(size_t i) const;  // columns of the output of layer i
  bool has_scales() const;              // there is a ScaledSwiGLU
  // Which layers run as what, why others are not fused, and in what precision; one line each.
  std::string describe() const;
  bool fused_at(size_t i) const { return fused_[i]; }  // layers i, i+1 and i+2 are one operation
  bool codes_at(size_t i) const;                       // and this one's products are native

  // y = layers(x), assigned. scales_R (f32) is read where there is a ScaledSwiGLU.
  void forward(Context& ctx, const ExpertRows& rows, TensorView x_RI, TensorView scales_R,
               const SequentialMemory& memory, TensorView y_RO) const;
  // Weight gradients are computed where the layer has a place for them.
  void backward(Context& ctx, const ExpertRows& rows, const SequentialMemory& memory,
                const SequentialBackward& args) const;

 private:
  std::string obstacle_at(size_t i) const;  // to a fusion of layers i, i+1, i+2
  const GroupedLinear& linear(size_t i) const { return std::get<GroupedLinear>(layers_[i]); }
  SwigluRows swiglu_of_codes(size_t first, const ExpertRows& rows, TensorView scales_R,
                             const SequentialMemory& memory) const;
  // Of the three layers from `first` on: see codes_at().
  void forward_codes(Context& ctx, size_t first, const ExpertRows& rows, TensorView x_RI, TensorView scales_R,
                     const SequentialMemory& memory, TensorView y_RO) const;
  void backward_codes(Context& ctx, size_t first, const ExpertRows& rows, const SequentialMemory& memory,
                      const SequentialBackward& args) const;
  std::string precisions_of(size_t i) const;
  void check_widths() const;

  Device device_;
  DType type_;
  Fusion fusion_;
  std::array<ExpertLayer, kMaxLayers> layers_{};
  std::array<bool, kMaxLayers> fused_{};
  size_t count_ = 0;
};

}  // namespace biomoe
