#include "biomoe/backend/cuda/mx_products.h"

#include <cuda_runtime.h>

#include "biomoe/backend/cuda/gemm/sm100_mxfp8_grouped.h"
#include "biomoe/backend/cuda/state.h"
#include "biomoe/core/error.h"

namespace biomoe::cuda {
namespace {

using sm100::GroupedProduct;

// Operands, and the output by its view: of rows and experts the rest is the caller's.
GroupedProduct product_of(const MxCodes& codes, const TensorView& d, bool accumulate) {
  const auto operand = [](const TensorView& values, const TensorView& scales) {
    return sm100::MxOperand{static_cast<const uint8_t*>(values.data),
                            static_cast<const uint8_t*>(scales.data)};
  };
  BM_CHECK(d.contiguous(), "a product of MX codes: the output {} has a row stride of {}", d.shape.str(),
           d.row_stride);
  return {.a = operand(codes.a, codes.a_scales),
          .b = operand(codes.b, codes.b_scales),
          .d = d.data,
          .type = d.dtype == DType::kF32 ? sm100::OutputType::kFp32 : sm100::OutputType::kBf16,
          .accumulate = accumulate};
}

void run(const char* op, Context& ctx, const GroupedProduct& product) {
  const DeviceState& state = *ctx.state;
  if (!sm100::built() || state.compute_capability != sm100::kComputeCapability) {
    throw user_error(
        "{}: MXFP8 codes are multiplied on compute capability {}.{} by a biomoe built with BIOMOE_SM100=ON; "
        "this GPU has {}.{} and this biomoe was built with BIOMOE_SM100={}: multiply what the codes stand "
        "for, in BF16",
        op, sm100::kComputeCapability / 10, sm100::kComputeCapability % 10, state.compute_capability / 10,
        state.compute_capability % 10, sm100::built() ? "ON" : "OFF");
  }
  const cudaError_t error =
      sm100::launch(product, state.workspace, static_cast<int64_t>(state.workspace_bytes), state.stream);
  if (error == cudaErrorInvalidValue) {
    throw user_error(
        "{}: {} experts of these widths cannot run as one product of MX codes (at most {} experts, widths "
        "that are multiples of {})",
        op, product.experts, sm100::kMaxExperts, MxScaleLayout::kBlock);
  }
  check(error, op);
}

GroupedProduct with_experts(GroupedProduct product, const GroupedGemmArgs& args) {
  product.experts = static_cast<int>(args.w_EOI.shape[0]);
  product.capacity = args.x_RI.shape[0];
  product.offsets = args.offsets_E1.i64();
  return product;
}

}  // namespace

void mx_forward(Context& ctx, const GroupedGemmArgs& args) {
  GroupedProduct product = with_experts(product_of(args.mx_codes, args.y_RO, false), args);
  product.n = args.w_EOI.shape[1];
  product.k = args.w_EOI.shape[2];
  run("grouped_gemm_forward", ctx, product);
}

void mx_dgrad(Context& ctx, const GroupedGemmArgs& args) {
  GroupedProduct product = with_experts(product_of(args.mx_codes, args.x_RI, false), args);
  product.n = args.w_EOI.shape[2];
  product.k = args.w_EOI.shape[1];
  run("grouped_gemm_dgrad", ctx, product);
}

void mx_wgrad(Context& ctx, const GroupedGemmArgs& args) {
  GroupedProduct product = with_experts(product_of(args.mx_codes, args.w_EOI, args.accumulate), args);
  product.segments = sm100::SegmentAxis::kSums;
  product.m = args.w_EOI.shape[1];
  product.n = args.w_EOI.shape[2];
  run("grouped_gemm_wgrad", ctx, product);
}

void mx_gemm(Context& ctx, const GemmArgs& args) {
  GroupedProduct product = product_of(args.mx_codes, args.c, args.accumulate);
  product.experts = 1;
  product.capacity = args.a.shape[0];
  product.n = args.c.shape[1];
  if (args.transpose_a) {
    product.segments = sm100::SegmentAxis::kSums;
    product.m = args.c.shape[0];
  } else {
    product.k = args.a.shape[1];
  }
  run("gemm", ctx, product);
}

}  // namespace biomoe::cuda
