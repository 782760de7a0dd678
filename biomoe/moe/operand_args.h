// What the ways of quantising an operand have in common.
#pragma once

#include "biomoe/core/tensor_view.h"
#include "biomoe/ops/quantize.h"
#include "biomoe/quant/recipe.h"

namespace biomoe {

inline void set_operand(QuantizeArgs& args, const QuantizationSpec& spec, TensorView x_RC) {
  args.x_RC = x_RC;
  args.format = spec.format;
  args.rule = spec.rule;
  args.block = spec.block;
}

}  // namespace biomoe
