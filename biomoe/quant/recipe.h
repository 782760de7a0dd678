// The recipes of low-precision training: which blocks, scales and formats the operands of products get.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "biomoe/quant/block_grid.h"
#include "biomoe/quant/scaling.h"

namespace biomoe {

enum class Fp8Recipe : uint8_t {
  kMxfp8BlockScaling,
  kFloat8BlockScaling,
  kFloat8CurrentScaling,
  kDelayedScaling
};
inline constexpr std::array<std::string_view, 4> kFp8RecipeNames{"MXFP8BlockScaling", "Float8BlockScaling",
                                                                 "Float8CurrentScaling", "DelayedScaling"};

// kAuto: E4M3 for the block recipes, HYBRID for the per-tensor ones. HYBRID: gradients in E5M2, the rest in
// E4M3.
enum class Fp8FormatChoice : uint8_t { kAuto, kE4M3, kHybrid };
inline constexpr std::array<std::string_view, 3> kFp8FormatChoiceNames{"auto", "E4M3", "HYBRID"};

enum class MxScaleRounding : uint8_t { kUp, kFloor };
inline constexpr std::array<std::string_view, 2> kMxScaleRoundingNames{"up", "floor"};

enum class AmaxAlgorithm : uint8_t { kMax, kMostRecent };
inline constexpr std::array<std::string_view, 2> kAmaxAlgorithmNames{"max", "most_recent"};

// fp8_config.fp8_recipe_kwargs
struct Fp8RecipeOptions {
  MxScaleRounding scale_rounding = MxScaleRounding::kUp;
  bool power_2_scale = true;
  bool emulate = false;
  bool keep_weights = true;
  int64_t margin = 0;
  int64_t amax_history_len = 1024;
  AmaxAlgorithm amax_compute_algo = AmaxAlgorithm::kMax;

  template <typename Visitor>
  void visit(Visitor& v) {
    v.choice(
        "scale_rounding", scale_rounding, kMxScaleRoundingNames,
        "MXFP8BlockScaling: amax / largest value rounded up to a power of two (Transformer Engine), or the "
        "scale of OCP MX 1.0");
    v.field("power_2_scale", power_2_scale,
            "the other recipes: what elements are multiplied with is rounded down to a power of two; GPUs "
            "need it");
    v.field("emulate", emulate,
            "Float8BlockScaling: on a GPU that multiplies its codes, multiply in BF16 what they stand for");
    v.field("keep_weights", keep_weights,
            "MXFP8BlockScaling emulated on a GPU: keep beside the weights, in 2 bytes each, what their codes "
            "stand for, instead of making it for every product; not where parameters are sharded");
    v.field("margin", margin, "DelayedScaling: scales are smaller by 2^margin");
    v.field("amax_history_len", amax_history_len, "DelayedScaling: steps that amax is remembered for");
    v.choice("amax_compute_algo", amax_compute_algo, kAmaxAlgorithmNames,
             "DelayedScaling: which amax of the history the scale is for");
  }
};

// fp8_config.quantized_model_init_kwargs
struct QuantizedInitOptions {
  bool enabled = false;
  bool preserve_high_precision_init_val = false;

  template <typename Visitor>
  void visit(Visitor& v) {
    v.field(
        "enabled", enabled,
        "keep weights as 8-bit codes and fp32 masters, with no 16-bit copy beside them; they begin as what "
        "their codes stand for");
    v.field("preserve_high_precision_init_val", preserve_high_precision_init_val,
            "masters begin with the initial weights as they are instead");
  }
};

// fp8_config
struct Fp8Config {
  bool enabled = false;
  Fp8Recipe fp8_recipe = Fp8Recipe::kMxfp8BlockScaling;
  Fp8FormatChoice fp8_format = Fp8FormatChoice::kAuto;
  Fp8RecipeOptions fp8_recipe_kwargs;
  QuantizedInitOptions quantized_model_init_kwargs;

  // Whether a model's first weights are rounded to what their codes stand for.
  bool rounds_initial_weights() const {
    return enabled && quantized_model_init_kwargs.enabled &&
           !quantized_model_init_kwargs.preserve_high_precision_init_val;
  }

  void validate() const;  // throws user_error naming the key

  template <typename Visitor>
  void visit(Visitor& v) {
    v.field("enabled", enabled,
            "quantise the operands of the experts' products and of the attention projections");
    v.choice("fp8_recipe", fp8_recipe, kFp8RecipeNames, "blocks and scales, see docs/numerics.md");
    v.choice(
        "fp8_format", fp8_format, kFp8FormatChoiceNames,
        "format of the elements; HYBRID: E5M2 for gradients, E4M3 for the rest; auto: E4M3 for the block "
        "recipes, HYBRID for the others");
    v.section("fp8_recipe_kwargs", fp8_recipe_kwargs);
    v.section("quantized_model_init_kwargs", quantized_model_init_kwargs);
  }
};

// What an operand of a product is.
enum class Operand : uint8_t { kActivation, kWeight, kGradient };

struct QuantizationSpec {
  Fp8Format format = Fp8Format::kE4M3;
  ScaleRule rule = ScaleRule::kMxUp;
  BlockShape block{};
};

// How `operand`, a matrix of rows, is quantised for a product that sums over its columns (row-wise), or over
// its rows (column-wise).
QuantizationSpec quantization_spec(const Fp8Config& config, Operand operand, bool sums_over_rows);

}  // namespace biomoe
