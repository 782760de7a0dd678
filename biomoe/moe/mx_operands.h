// The operands of a layer's products in recipe MXFP8BlockScaling where the device multiplies their codes (see
// MxCodes): made for each product, in memory that all products share.
#pragma once

#include <span>

#include "biomoe/core/arena.h"
#include "biomoe/core/context.h"
#include "biomoe/ops/scaled_codes.h"
#include "biomoe/quant/recipe.h"

namespace biomoe {

// Of the products of `rows` rows with weights of [experts, out, in].
struct MxProductShape {
  int64_t rows = 0, experts = 0, out = 0, in = 0;
};

// Memory for both operands of the largest product: flat, u8.
MxCodes allocate_mx_codes(TensorAllocator& allocator, std::span<const MxProductShape> products,
                          bool training);

// Why products with weights [out, in] are not of MX codes on `device`; "" where they are.
std::string mx_obstacle(const Fp8Config& config, Device device, int64_t out, int64_t in);

struct MxOperands {
  const Fp8Config* config = nullptr;
  MxCodes memory{};  // absent: products are not of MX codes
  explicit operator bool() const { return static_cast<bool>(memory); }

  // Whether products of so many rows are; rows without experts are padded for nothing.
  bool of_rows(int64_t rows) const;

  // Rows are those of experts, in groups [offsets[e], offsets[e + 1]) that begin at multiples of 128, by
  // weights [E, out, in]; or without offsets one group, by weights [out, in]. Good until the next call of any
  // layer.
  MxCodes forward(Context& ctx, TensorView x_RI, TensorView w_EOI, TensorView offsets_E1) const;
  MxCodes dgrad(Context& ctx, TensorView dy_RO, TensorView w_EOI, TensorView offsets_E1) const;
  MxCodes wgrad(Context& ctx, TensorView dy_RO, TensorView x_RI, TensorView offsets_E1) const;
};

}  // namespace biomoe
