#include "biomoe/moe/sequential.h"

#include <fmt/format.h>

#include <algorithm>

#include "biomoe/core/error.h"
#include "biomoe/ops/cuda_sizes.h"
#include "biomoe/ops/device.h"
#include "biomoe/ops/grouped_gemm.h"
#include "biomoe/ops/scaled_swiglu.h"

namespace biomoe {
namespace {

int gpu_compute_capability() {
  static const int capability = device_info(Device::kCuda).compute_capability;
  return capability;
}

std::string name_of(const ExpertLayer& layer) {
  return std::visit([](const auto& which) { return which.str(); }, layer);
}

}  // namespace

std::string ScaledSwiGLU::str() const {
  return fmt::format("ScaledSwiGLU(interleave {})", interleave);
}

std::string fused_mlp_device_obstacle(int compute_capability, int64_t expert_width, int64_t interleave) {
  if (compute_capability == 0) return "";
  if (compute_capability != 90) {
    return fmt::format("this GPU has compute capability {}.{} and the fused kernels are for 9.0",
                       compute_capability / 10, compute_capability % 10);
  }
  if (expert_width % cuda::kGateUpInterleave != 0) {
    return fmt::format("the expert width {} is no multiple of {}", expert_width, cuda::kGateUpInterleave);
  }
  if (interleave != cuda::kGateUpInterleave) {
    return fmt::format("gate and up columns are interleaved by {}, and the fused kernels want {}", interleave,
                       cuda::kGateUpInterleave);
  }
  return "";
}

std::string fused_mlp_obstacle(Device device, DType type, const GroupedLinear& gate_up,
                               const ScaledSwiGLU& activation, const GroupedLinear& down) {
  for (const GroupedLinear* linear : {&gate_up, &down}) {
    if (linear->product == GroupedProduct::kLoop)
      return fmt::format("{} runs one GEMM an expert", linear->str());
  }
  if (gate_up.native() != down.native()) {
    return fmt::format("of {} and {} only one multiplies codes", gate_up.str(), down.str());
  }
  if (device == Device::kCuda && type != DType::kBF16) {
    return fmt::format("the GPU's fused kernels compute in BF16, not {}", dtype_name(type));
  }
  return fused_mlp_device_obstacle(device == Device::kCpu ? 0 : gpu_compute_capability(), down.in_features(),
                                   activation.interleave);
}

Sequential::Sequential(Device device, DType type, std::initializer_list<ExpertLayer> layers, Fusion fusion)
    : device_(device), type_(type), fusion_(fusion), count_(layers.size()) {
  if (count_ == 0 || count_ > kMaxLayers) {
    throw user_error("Sequential: {} layers, expected 1 to {}", count_, kMaxLayers);
  }
  std::copy(layers.begin(), layers.end(), layers_.begin());
  check_widths();
  bool any = false;
  for (size_t i = 0; fusion_ != Fusion::kOff && i < count_; ++i) {
    if (!obstacle_at(i).empty()) continue;
    fused_[i] = any = true;
    i += 2;
  }
  if (fusion_ == Fusion::kRequired && !any) {
    std::string why = obstacle_at(0);
    for (size_t i = 1; i < count_ && why.empty(); ++i) why = obstacle_at(i);
    throw user_error(
        "Sequential: a fused operation is required, but {}; change that, or do not require fusion", why);
  }
}

void Sequential::check_widths() const {
  int64_t width = 0, experts = 0;
  for (size_t i = 0; i < count_; ++i) {
    if (const auto* linear = std::get_if<GroupedLinear>(&layers_[i])) {
      if (linear->w_EOI.shape.rank() != 3) {
        throw user_error("Sequential: layer {}: weights of shape {}, expected [experts, out, in]", i,
                         linear->w_EOI.shape.str());
      }
      if (experts > 0 && linear->num_experts() != experts) {
        throw user_error("Sequential: layer {}: {} follows layers of {} experts", i, linear->str(), experts);
      }
      if (width > 0 && linear->in_features() != width) {
        throw user_error("Sequential: layer {}: {} is given {} columns", i, linear->str(), width);
      }
      experts = linear->num_experts();
      width = linear->out_features();
      continue;
    }
    const int64_t interleave = std::get<ScaledSwiGLU>(layers_[i]).interleave;
    if (i == 0)
      throw user_error("Sequential: the first layer is {}, expected a GroupedLinear", name_of(layers_[i]));
    if (width % 2 != 0 || interleave < 0 || (interleave > 0 && width / 2 % interleave != 0)) {
      throw user_error(
          "Sequential: layer {}: {} is given {} columns, expected gate and up columns in equal parts", i,
          name_of(layers_[i]), width);
    }
    width /= 2;
  }
}

std::string Sequential::obstacle_at(size_t i) const {
  const auto* gate_up = std::get_if<GroupedLinear>(&layers_[i]);
  const auto* activation = i + 1 < count_ ? std::get_if<ScaledSwiGLU>(&layers_[i + 1]) : nullptr;
  const auto* down = i + 2 < count_ ? std::get_if<GroupedLinear>(&layers_[i + 2]) : nullptr;
  if (!gate_up || !activation || !down) {
    return "there is no GroupedLinear -> ScaledSwiGLU -> GroupedLinear";
  }
  return fused_mlp_obstacle(device_, type_, *gate_up, *activation, *down);
}

int64_t Sequential::num_experts() const {
  return std::get<GroupedLinear>(layers_[0]).num_experts();
}

int64_t Sequential::in_features() const {
  return std::get<GroupedLinear>(layers_[0]).in_features();
}

int64_t Sequential::width_after(size_t i) const {
  if (const auto* linear = std::get_if<GroupedLinear>(&layers_[i])) return linear->out_features();
  return width_after(i - 1) / 2;
}

bool Sequential::has_scales() const {
  return std::any_of(layers_.begin(), layers_.begin() + static_cast<int64_t>(count_),
                     [](const ExpertLayer& layer) { return std::holds_alternative<ScaledSwiGLU>(layer); });
}

// Of the two linear maps of a fused operation.
std::string Sequential::precisions_of(size_t i) const {
  const std::string first = std::get<GroupedLinear>(layers_[i]).precision(device_);
  const std::string last = std::get<GroupedLinear>(layers_[i + 2]).precision(device_);
  return first == last ? first : fmt::format("{} and {}", first, last);
}

std::string Sequential::describe() const {
  std::string text;
  for (size_t i = 0; i < count_; ++i) {
    if (fused_[i]) {
      text +=
          fmt::format("layers {}-{}: fused_grouped_mlp of {}, {}, {}; {}\n", i, i + 2, name_of(layers_[i]),
                      name_of(layers_[i + 1]), name_of(layers_[i + 2]), precisions_of(i));
      i += 2;
      continue;
    }
    const auto* linear = std::get_if<GroupedLinear>(&layers_[i]);
    const char* way = !linear                                    ? "an operation of its own"
                      : linear->product == GroupedProduct::kLoop ? "one GEMM an expert"
                                                                 : "one grouped GEMM";
    text += fmt::format("layer {}: {}: {}", i, name_of(layers_[i]), way);
    if (linear) {
      text += fmt::format("; not fused: {}; {}", fusion_ == Fusion::kOff ? "fusion is off" : obstacle_at(i),
                          linear->precision(device_));
    }
    text += "\n";
  }
  return text;
}

bool Sequential::codes_at(size_t i) const {
  return fused_[i] && linear(i).native();
}

SwigluRows Sequential::swiglu_of_codes(size_t first, const ExpertRows& rows, TensorView scales_R,
                                       const SequentialMemory& memory) const {
  return {.gate_up_R2F = memory.hidden[first],
          .kept_RC = memory.kept[first],
          .probs_R = scales_R,
          .offsets_E1 = rows.offsets_E1,
          .interleave = std::get<ScaledSwiGLU>(layers_[first + 1]).interleave};
}

void Sequential::forward_codes(Context& ctx, size_t first, const ExpertRows& rows, TensorView x_RI,
                               TensorView scales_R, const SequentialMemory& memory, TensorView y_RO) const {
  const GroupedLinear &gate_up = linear(first), &down = linear(first + 2);
  gate_up.forward(ctx, rows, x_RI, memory.hidden[first]);
  const BlockScaledCodes act =
      down.quantizer.native_forward(ctx, swiglu_of_codes(first, rows, scales_R, memory));
  down.forward(ctx, rows, TensorView(nullptr, type_, act.rows_RK.shape), y_RO, act);
}

void Sequential::backward_codes(Context& ctx, size_t first, const ExpertRows& rows,
                                const SequentialMemory& memory, const SequentialBackward& args) const {
  const GroupedLinear &gate_up = linear(first), &down = linear(first + 2);
  const TensorView dy = first + 3 == count_ ? args.dy_RO : memory.gradient[first + 2];
  const TensorView input = first == 0 ? args.x_RI : memory.hidden[first - 1];
  const TensorView dinput = first == 0 ? args.dx_RI : memory.gradient[first - 1];
  const TensorView dact = memory.gradient[first + 1];
  auto of_down = down.quantizer.native_gradient(ctx, dy, rows.offsets_E1, true);
  down.dgrad(ctx, rows, dy, dact, of_down.dgrad);
  auto of_gate_up =
      gate_up.quantizer.native_swiglu_backward(ctx, swiglu_of_codes(first, rows, args.scales_R, memory), dact,
                                               args.dscales_R, down.quantizer, of_down.wgrad);
  // The codes of act give way to those of the input.
  if (down.dw_EOI) down.wgrad(ctx, rows, dy, dact, args.accumulate, of_down.wgrad);
  const TensorView dgate_up(nullptr, type_, Shape{dact.shape[0], 2 * dact.shape[1]});
  if (gate_up.dw_EOI) {
    gate_up.quantizer.native_input(ctx, input, rows.offsets_E1, of_gate_up.wgrad);
    gate_up.wgrad(ctx, rows, dgate_up, input, args.accumulate, of_gate_up.wgrad);
  }
  if (dinput) gate_up.dgrad(ctx, rows, dgate_up, dinput, of_gate_up.dgrad);
}

void Sequential::forward(Context& ctx, const ExpertRows& rows, TensorView x_RI, TensorView scales_R,
                         const SequentialMemory& memory, TensorView y_RO) const {
  for (size_t i = 0; i < count_; ++i) {
    const auto output = [&](size_t of) { return of + 1 == count_ ? y_RO : memory.hidden[of]; };
    const TensorView input = i == 0 ? x_RI : memory.hidden[i - 1];
    if (codes_at(i)) {
      forward_codes(ctx, i, rows, input, scales_R, memory, output(i + 2));
      i += 2;
    } else if (fused_[i]) {
      const auto [x, w] = linear(i).forward_operands(ctx, rows, input);
      grouped_gate_up(ctx, {.x_RD = x,
                            .w_E2FD = w,
                            .gate_up_R2F = memory.hidden[i],
                            .probs_R = scales_R,
                            .act_RF = memory.hidden[i + 1],
                            .offsets_E1 = rows.offsets_E1,
                            .rows_E = rows.rows_E,
                            .interleave = std::get<ScaledSwiGLU>(layers_[i + 1]).interleave});
      linear(i + 2).forward(ctx, rows, memory.hidden[i + 1], output(i + 2));
      i += 2;
    } else if (const auto* layer = std::get_if<GroupedLinear>(&layers_[i])) {
      layer->forward(ctx, rows, input, output(i));
    } else {
      scaled_swiglu_forward(ctx, {.gate_up_R2F = input,
                                  .probs_R = scales_R,
                                  .act_RF = output(i),
                                  .offsets_E1 = rows.offsets_E1,
                                  .interleave = std::get<ScaledSwiGLU>(layers_[i]).interleave});
    }
  }
}

void Sequential::backward(Context& ctx, const ExpertRows& rows, const SequentialMemory& memory,
                          const SequentialBackward& args) const {
  for (size_t i = count_; i-- > 0;) {
    if (i >= 2 && codes_at(i - 2)) {
      i -= 2;
      backward_codes(ctx, i, rows, memory, args);
      continue;
    }
    const TensorView dy = i + 1 == count_ ? args.dy_RO : memory.gradient[i];
    const TensorView input = i == 0 ? args.x_RI : memory.hidden[i - 1];
    const TensorView dinput = i == 0 ? args.dx_RI : memory.gradient[i - 1];
    if (const auto* activation = std::get_if<ScaledSwiGLU>(&layers_[i])) {
      scaled_swiglu_backward(ctx, {.dact_RF = dy,
                                   .gate_up_R2F = input,
                                   .probs_R = args.scales_R,
                                   .dgate_up_R2F = dinput,
                                   .dprobs_R = args.dscales_R,
                                   .offsets_E1 = rows.offsets_E1,
                                   .interleave = activation->interleave});
      continue;
    }
    const GroupedLinear& layer = linear(i);
    // Before the gradient of the input may replace the input.
    const auto of = layer.backward_codes(ctx, rows, dy, layer.dw_EOI ? input : TensorView());
    if (layer.dw_EOI) layer.wgrad(ctx, rows, dy, input, args.accumulate, of.wgrad);
    if (i >= 2 && fused_[i - 2]) {
      const auto [dout, w] = layer.dgrad_operands(ctx, rows, dy);
      grouped_down_backward(ctx, {.dy_RD = dout,
                                  .w_EDF = w,
                                  .gate_up_R2F = memory.hidden[i - 2],
                                  .probs_R = args.scales_R,
                                  .dact_RF = memory.gradient[i - 1],
                                  .dgate_up_R2F = memory.gradient[i - 2],
                                  .dprobs_R = args.dscales_R,
                                  .offsets_E1 = rows.offsets_E1,
                                  .rows_E = rows.rows_E,
                                  .interleave = std::get<ScaledSwiGLU>(layers_[i - 1]).interleave});
      --i;  // the activation is done
    } else if (dinput) {
      layer.dgrad(ctx, rows, dy, dinput, of.dgrad);
    }
  }
}

}  // namespace biomoe
