// SwiGLU times routing probability, element by element in FP32: the one definition that fused and unfused
// kernels share, so that both give the same bits. Every operation is spelled out, so that no product is
// contracted into a sum in one caller and not in another.
#pragma once

#include <cuda_runtime.h>

namespace biomoe::cuda {

// gate / (1 + exp(-gate)). For gate below -88 the quotient of two large numbers is zero, its limit.
__device__ __forceinline__ float silu(float gate) {
  return __fdividef(gate, __fadd_rn(1.0f, __expf(-gate)));
}

__device__ __forceinline__ float scaled_swiglu(float gate, float up, float prob) {
  return __fmul_rn(__fmul_rn(silu(gate), up), prob);
}

struct ScaledSwigluGradient {
  float dgate, dup, dprob;
};

// silu'(g) = s + g s (1 - s) with s = sigmoid(g).
__device__ __forceinline__ ScaledSwigluGradient scaled_swiglu_gradient(float dact, float gate, float up,
                                                                       float prob) {
  const float sigmoid = __fdividef(1.0f, __fadd_rn(1.0f, __expf(-gate)));
  const float silu_gate = __fmul_rn(gate, sigmoid);
  const float dsilu = __fmaf_rn(silu_gate, __fadd_rn(1.0f, -sigmoid), sigmoid);
  const float scaled = __fmul_rn(dact, prob);
  return {__fmul_rn(__fmul_rn(scaled, up), dsilu), __fmul_rn(scaled, silu_gate),
          __fmul_rn(dact, __fmul_rn(silu_gate, up))};
}

}  // namespace biomoe::cuda
