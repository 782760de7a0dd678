#include "biomoe/model/fp8_state.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "biomoe/core/error.h"
#include "biomoe/model/block.h"
#include "biomoe/ops/cuda_sizes.h"
#include "biomoe/ops/device.h"
#include "biomoe/ops/fill.h"
#include "biomoe/ops/quantize.h"

namespace biomoe {
namespace {

constexpr int64_t kOperands = 3;

// Groups of the products of a block.
std::array<int64_t, 4> product_groups(int64_t experts) {
  return {1, 1, experts, experts};
}

// The products of a block, in this order everywhere.
enum Product : size_t { kQkv, kOut, kGateUp, kDown, kNumProducts };
constexpr std::array<std::string_view, kNumProducts> kProductNames{
    "the projections to queries, keys and values", "from attention", "gate and up", "down"};

struct WeightShape {
  int64_t experts, out, in;
};
std::array<WeightShape, kNumProducts> weight_shapes(const ModelConfig& model, const Fp8StateShape& shape) {
  const int64_t D = model.hidden_size, F = model.intermediate_size;
  const int64_t A = model.num_attention_heads * model.key_width(), C = model.qkv_width();
  const int64_t E = moe_shape(model, shape.types, shape.split).held_experts();
  return {{{1, C, D}, {1, D, A}, {E, 2 * F, D}, {E, D, F}}};
}

// Why each product does not multiply codes; "" where it does. Products of codes are those of all experts at
// once; fused ones pass codes on, and so are native together or not at all.
std::array<std::string, kNumProducts> native_obstacles(const ModelConfig& model, const Fp8StateShape& shape) {
  std::array<std::string, kNumProducts> obstacles;
  const auto weights = weight_shapes(model, shape);
  for (size_t i = 0; i < kNumProducts; ++i) {
    obstacles[i] = native_obstacle(shape.config, shape.device, weights[i].out, weights[i].in);
    if (obstacles[i].empty() && shape.mode == ExpertFfnMode::kLoop) obstacles[i] = "one GEMM an expert";
  }
  if (shape.mode != ExpertFfnMode::kFusedGroupedMlp) return obstacles;
  for (const auto& [product, other] : {std::pair{kGateUp, kDown}, std::pair{kDown, kGateUp}}) {
    if (obstacles[product].empty() && !obstacles[other].empty()) {
      obstacles[product] = fmt::format("{} cannot be native", kProductNames[other]);
    }
  }
  return obstacles;
}

constexpr bool of_experts(size_t product) {
  return product == kGateUp || product == kDown;
}

// Of each product, whether what the codes of its weights stand for is kept, see MxWeights.
std::array<bool, kNumProducts> kept_weights(const ModelConfig& model, const Fp8StateShape& shape) {
  constexpr int64_t kBlock = MxWeights::kBlock;
  const bool any = shape.training && shape.device != Device::kCpu && !shape.place.shards &&
                   shape.config.fp8_recipe == Fp8Recipe::kMxfp8BlockScaling &&
                   shape.config.fp8_recipe_kwargs.keep_weights;
  const auto weights = weight_shapes(model, shape);
  const auto obstacles = native_obstacles(model, shape);
  std::array<bool, kNumProducts> kept{};
  for (size_t i = 0; i < kNumProducts; ++i) {
    kept[i] = any && !obstacles[i].empty() && weights[i].out % kBlock == 0 && weights[i].in % kBlock == 0;
  }
  return kept;
}

// Weights that ranks shard are whole only while they are used, and so are their codes: layers take turns.
bool codes_in_turns(const Fp8StateShape& shape, size_t product) {
  const MeshSize& size = shape.place.size;
  return shape.place.shards && (of_experts(product) ? size.dp : size.world()) > 1;
}

int64_t scales_a_layer(int64_t experts) {
  int64_t count = 0;
  for (const int64_t groups : product_groups(experts)) count += kOperands * groups;
  return count;
}

}  // namespace

bool fp8_layer(const ModelConfig& model, int64_t layer) {
  return model.layer_precision.empty() || model.layer_precision.at(static_cast<size_t>(layer)) == "fp8";
}

QuantizedWeights quantized_weights(const ModelConfig& model, const Fp8StateShape& shape) {
  QuantizedWeights count;
  if (!shape.config.enabled) return count;
  const auto weights = weight_shapes(model, shape);
  const auto obstacles = native_obstacles(model, shape);
  const auto kept = kept_weights(model, shape);
  for (int64_t layer = 0; layer < model.num_hidden_layers; ++layer) {
    if (!fp8_layer(model, layer)) continue;
    for (size_t i = 0; i < kNumProducts; ++i) {
      const auto& [experts, out, in] = weights[i];
      (obstacles[i].empty() ? count.native : kept[i] ? count.kept : count.emulated) += experts * out * in;
      if (obstacles[i].empty())
        count.native_active += (of_experts(i) ? model.num_experts_per_tok : 1) * out * in;
    }
  }
  return count;
}

std::string describe_products(const ModelConfig& model, const Fp8StateShape& shape) {
  const Fp8Config& config = shape.config;
  if (!config.enabled) return "";
  const std::string_view type = dtype_name(shape.types.activation);
  std::string text = fmt::format("{}: ", kFp8RecipeNames[static_cast<size_t>(config.fp8_recipe)]);
  const std::string start = config.rounds_initial_weights() ? "; weights begin as what codes stand for" : "";
  const auto obstacles = native_obstacles(model, shape);
  const bool any =
      std::any_of(obstacles.begin(), obstacles.end(), [](const auto& why) { return why.empty(); });
  const bool block_scaling = config.fp8_recipe == Fp8Recipe::kFloat8BlockScaling;
  if (shape.device == Device::kCpu || (!any && !block_scaling))
    return text + fmt::format("emulated exactly, in {}", type) + start;
  for (size_t i = 0; i < kNumProducts; ++i) {
    text += fmt::format("{}{} {}", i == 0 ? "" : "; ", kProductNames[i],
                        obstacles[i].empty()
                            ? "native"
                            : fmt::format("emulated exactly in {}, since {}", type, obstacles[i]));
  }
  return text + start;
}

bool mx_experts(const ModelConfig& model, const Fp8Config& config, Device device) {
  if (!config.enabled || config.fp8_recipe != Fp8Recipe::kMxfp8BlockScaling) return false;
  for (int64_t layer = 0; layer < model.num_hidden_layers; ++layer) {
    if (!fp8_layer(model, layer)) return false;
  }
  const int64_t D = model.hidden_size, F = model.intermediate_size;
  return native_obstacle(config, device, 2 * F, D).empty() && native_obstacle(config, device, D, F).empty();
}

bool passes_codes(const ModelConfig& model, const Fp8StateShape& shape) {
  return shape.config.enabled && shape.mode == ExpertFfnMode::kFusedGroupedMlp &&
         native_obstacles(model, shape)[kDown].empty();
}

Fp8State::Memory Fp8State::lay_out(TensorAllocator& allocator, const ModelConfig& model,
                                   const Fp8StateShape& shape) {
  Memory memory;
  const Fp8Config& config = shape.config;
  if (!config.enabled) return memory;
  lay_out_codes(allocator, model, shape, memory);
  lay_out_mx_weights(allocator, model, shape, memory);
  const int64_t T = shape.tokens;
  const MoeShape moe = moe_shape(model, shape.types, shape.split);
  const int64_t R = moe.rows(T);
  const auto weights = weight_shapes(model, shape);
  const auto obstacles = native_obstacles(model, shape);
  const auto kept = kept_weights(model, shape);
  std::array<int64_t, kOperands> elements{};  // activations, weights, gradients: of the largest product
  for (size_t i = 0; i < kNumProducts; ++i) {
    // The experts' rows are padded, so that what can be native is; projections of odd rows are emulated.
    const bool expert = of_experts(i);
    if (expert && obstacles[i].empty()) continue;
    const auto& [experts, out, in] = weights[i];
    const int64_t rows = expert ? R : T;
    elements[0] = std::max(elements[0], rows * in);
    if (!kept[i]) elements[1] = std::max(elements[1], experts * out * in);
    if (shape.training) elements[2] = std::max(elements[2], rows * out);
  }
  for (size_t i = 0; i < elements.size(); ++i)
    memory.operands[i] = allocator.tensor(shape.types.activation, {elements[i]});
  if (config.fp8_recipe != Fp8Recipe::kDelayedScaling) return memory;
  const int64_t N = model.num_hidden_layers * scales_a_layer(model.num_local_experts);
  memory.amax_HN = allocator.tensor(DType::kF32, {config.fp8_recipe_kwargs.amax_history_len, N});
  memory.scales_N = allocator.tensor(DType::kF32, {N});
  memory.formats_N = allocator.tensor(DType::kU8, {N});
  return memory;
}

void Fp8State::lay_out_mx_weights(TensorAllocator& allocator, const ModelConfig& model,
                                  const Fp8StateShape& shape, Memory& memory) {
  const auto weights = weight_shapes(model, shape);
  const auto kept = kept_weights(model, shape);
  memory.mx_weights.resize(static_cast<size_t>(model.num_hidden_layers));
  for (int64_t layer = 0; layer < model.num_hidden_layers; ++layer) {
    if (!fp8_layer(model, layer)) continue;
    for (size_t i = 0; i < kNumProducts; ++i) {
      if (!kept[i]) continue;
      MxWeights& of_layer = memory.mx_weights[static_cast<size_t>(layer)][i];
      of_layer = allocate_mx_weights(allocator, shape.types.activation, weights[i].experts, weights[i].out,
                                     weights[i].in);
      of_layer.rule = quantization_spec(shape.config, Operand::kWeight, false).rule;
    }
  }
}

// Rows' codes are those of one product at a time, but where fused products pass them on.
void Fp8State::lay_out_codes(TensorAllocator& allocator, const ModelConfig& model, const Fp8StateShape& shape,
                             Memory& memory) {
  const int64_t R = moe_shape(model, shape.types, shape.split).rows(shape.tokens);
  const auto weights = weight_shapes(model, shape);
  const auto obstacles = native_obstacles(model, shape);
  std::vector<ProductRows> products;
  for (size_t i = 0; i < kNumProducts; ++i) {
    if (!obstacles[i].empty()) continue;
    const auto& [experts, out, in] = weights[i];
    const int64_t rows = of_experts(i) ? R : shape.tokens;
    products.push_back({rows, out, in, experts});
  }
  if (products.empty()) return;
  if (shape.config.fp8_recipe == Fp8Recipe::kMxfp8BlockScaling) {
    const MxCodes mx = allocate_mx_codes(allocator, products, shape.training);
    for (size_t i = 0; i < kNumProducts; ++i) {
      if (obstacles[i].empty()) memory.mx[i] = mx;
    }
    return;
  }
  const RowCodes rows = allocate_row_codes(allocator, products, shape.training);
  CodesAndScales down_gradient = rows.gradient;
  if (shape.training && passes_codes(model, shape)) {
    down_gradient = allocate_gradient_codes(allocator, {R, weights[kDown].out, weights[kDown].in});
  }
  memory.codes.resize(static_cast<size_t>(model.num_hidden_layers));
  std::array<std::optional<LayerCodes>, kNumProducts> last;
  for (int64_t layer = 0; layer < model.num_hidden_layers; ++layer) {
    if (!fp8_layer(model, layer)) continue;
    for (size_t i = 0; i < kNumProducts; ++i) {
      if (!obstacles[i].empty()) continue;
      LayerCodes& codes = memory.codes[static_cast<size_t>(layer)][i];
      const bool in_turns = codes_in_turns(shape, i);
      if (!in_turns || !last[i]) {
        last[i] = allocate_weight_codes(allocator, weights[i].experts, weights[i].out, weights[i].in,
                                        shape.training);
      }
      codes = *last[i];
      codes.in_turns = in_turns;
      codes.rows = rows;
      if (i == kDown) codes.rows.gradient = down_gradient;
    }
  }
}

size_t Fp8State::planned_bytes(const ModelConfig& model, const Fp8StateShape& shape) {
  return biomoe::planned_bytes([&](TensorAllocator& to) { lay_out(to, model, shape); });
}

Fp8State::Fp8State(Context& ctx, const ModelConfig& model, const Fp8StateShape& shape)
    : config_(shape.config),
      experts_(model.num_local_experts),
      held_(moe_shape(model, shape.types, shape.split).held_experts()) {
  first_held_ = shape.place.ep_rank * held_;
  const Fp8Config& config = shape.config;
  if (!config.enabled) return;
  for (int64_t layer = 0; layer < model.num_hidden_layers; ++layer)
    quantized_layers_.push_back(fp8_layer(model, layer));
  description_ = describe_products(model, shape);
  arena_ = Arena(planned_bytes(model, shape), "quantised operands", device_memory(ctx.device));
  memory_ = lay_out(arena_, model, shape);
  if (!delayed()) return;
  // Memory of arenas is zero, and so are histories; scales begin with 1.
  const auto count = static_cast<size_t>(memory_.scales_N.num_elements());
  const std::vector<float> ones(count, 1.0f);
  std::vector<uint8_t> formats;
  while (formats.size() < count) {
    for (const int64_t groups : product_groups(experts_)) {
      for (int64_t operand = 0; operand < kOperands; ++operand) {
        const Fp8Format format = quantization_spec(config, static_cast<Operand>(operand), false).format;
        formats.insert(formats.end(), static_cast<size_t>(groups), static_cast<uint8_t>(format));
      }
    }
  }
  copy_to_device(ctx, memory_.scales_N.data, ones.data(), count * sizeof(float));
  copy_to_device(ctx, memory_.formats_N.data, formats.data(), count);
  device_wait_sync(ctx);
}

BlockQuantizers Fp8State::block(int64_t layer) const {
  BlockQuantizers quantizers;
  if (!config_.enabled || !quantized_layers_.at(static_cast<size_t>(layer))) return quantizers;
  int64_t next = layer * scales_a_layer(experts_);
  const std::array<int64_t, 4> groups = product_groups(experts_);
  const std::array<OperandQuantizer*, 4> products{&quantizers.qkv, &quantizers.out, &quantizers.gate_up,
                                                  &quantizers.down};
  for (size_t i = 0; i < products.size(); ++i) {
    products[i]->config = &config_;
    products[i]->memory = memory_.operands;
    if (!memory_.codes.empty()) products[i]->codes = memory_.codes.at(static_cast<size_t>(layer))[i];
    products[i]->mx = memory_.mx[i];
    products[i]->mx_weights = memory_.mx_weights.at(static_cast<size_t>(layer))[i];
    if (!delayed()) continue;
    for (DelayedScales& scales : products[i]->delayed) {
      const bool expert = of_experts(i);
      const Shape shape{expert ? held_ : groups[i]};
      const int64_t first = next + (expert ? first_held_ : 0);
      scales.scales_G = TensorView(memory_.scales_N.f32() + first, DType::kF32, shape);
      scales.amax_G = TensorView(memory_.amax_HN.f32() + first, DType::kF32, shape);  // row 0: this step
      next += groups[i];
    }
  }
  return quantizers;
}

void Fp8State::start_step(Context& ctx) {
  // Passes between steps, of a validation, have raised it.
  if (delayed()) fill_zero(ctx, {.x = memory_.amax_HN.rows(0, 1)});
}

// Where a rank saw nothing, of others' experts above all, it has 0.
void Fp8State::share_amax(Context& ctx, Comm& world) {
  if (!delayed()) return;
  world.all_reduce(ctx, memory_.amax_HN.rows(0, 1), ReduceOp::kMax, "the largest magnitudes of operands");
}

void Fp8State::finish_step(Context& ctx) {
  if (!delayed()) return;
  const Fp8RecipeOptions& options = config_.fp8_recipe_kwargs;
  update_delayed_scales(ctx, {.amax_HN = memory_.amax_HN,
                              .scales_N = memory_.scales_N,
                              .formats_N = memory_.formats_N,
                              .margin = options.margin,
                              .most_recent = options.amax_compute_algo == AmaxAlgorithm::kMostRecent,
                              .power_of_two = options.power_2_scale});
}

}  // namespace biomoe
