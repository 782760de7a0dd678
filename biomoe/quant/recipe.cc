#include "biomoe/quant/recipe.h"

#include "biomoe/core/error.h"

namespace biomoe {

void Fp8Config::validate() const {
  const Fp8RecipeOptions& options = fp8_recipe_kwargs;
  // Below 0 the largest values saturate; beyond 8 the largest one of E4M3 is under 2 of 448, and most fall
  // among its subnormals.
  if (options.margin < 0 || options.margin > 8) {
    throw user_error("fp8_config.fp8_recipe_kwargs.margin={} is outside [0, 8]", options.margin);
  }
  if (options.amax_history_len < 1 || options.amax_history_len > 65536) {
    throw user_error("fp8_config.fp8_recipe_kwargs.amax_history_len={} is outside [1, 65536]",
                     options.amax_history_len);
  }
  if (quantized_model_init_kwargs.enabled && !enabled) {
    throw user_error(
        "fp8_config.quantized_model_init_kwargs.enabled=true keeps weights in 8 bits; set "
        "fp8_config.enabled=true");
  }
}

QuantizationSpec quantization_spec(const Fp8Config& config, Operand operand, bool sums_over_rows) {
  const bool blocks = config.fp8_recipe == Fp8Recipe::kMxfp8BlockScaling ||
                      config.fp8_recipe == Fp8Recipe::kFloat8BlockScaling;
  const bool hybrid = config.fp8_format == Fp8FormatChoice::kHybrid ||
                      (config.fp8_format == Fp8FormatChoice::kAuto && !blocks);
  const Fp8RecipeOptions& options = config.fp8_recipe_kwargs;
  const ScaleRule float_rule = options.power_2_scale ? ScaleRule::kPowerOfTwo : ScaleRule::kFloat;
  QuantizationSpec spec;
  spec.format = hybrid && operand == Operand::kGradient ? Fp8Format::kE5M2 : Fp8Format::kE4M3;
  switch (config.fp8_recipe) {
    case Fp8Recipe::kMxfp8BlockScaling:
      spec.rule = options.scale_rounding == MxScaleRounding::kUp ? ScaleRule::kMxUp : ScaleRule::kMxFloor;
      spec.block = sums_over_rows ? BlockShape{32, 1} : BlockShape{1, 32};
      return spec;
    case Fp8Recipe::kFloat8BlockScaling:
      spec.rule = float_rule;
      spec.block = operand == Operand::kWeight ? BlockShape{128, 128}
                                               : (sums_over_rows ? BlockShape{128, 1} : BlockShape{1, 128});
      return spec;
    case Fp8Recipe::kFloat8CurrentScaling:
      spec.rule = float_rule;
      spec.block = {0, 0};
      return spec;
    case Fp8Recipe::kDelayedScaling:
      spec.rule = ScaleRule::kGiven;
      spec.block = {0, 0};
      return spec;
  }
  throw failure("unknown recipe {}", static_cast<int>(config.fp8_recipe));
}

}  // namespace biomoe
