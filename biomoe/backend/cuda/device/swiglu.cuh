// SwiGLU times routing probability, element by element in FP32: the one definition that fused and unfused
// kernels share, so that both give the same bits. Every operation is spelled out, so that no product is
// contracted into a sum in one caller and not in another.
#pragma once

#include <cuda_runtime.h>

namespace biomoe::cuda {

// 1 / (1 + exp(-gate)), from the two approximate instructions (each within 2 units in the last place).
// Flushing subnormal numbers to zero saves the instructions that would scale them; what is lost is a sigmoid
// below 1.2e-38, where gate is below -87.
__device__ __forceinline__ float sigmoid(float gate) {
  constexpr float kLog2E = 1.44269504f;
  float exponential, quotient;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(exponential) : "f"(__fmul_rn(gate, -kLog2E)));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(quotient) : "f"(__fadd_rn(1.0f, exponential)));
  return quotient;
}

__device__ __forceinline__ float scaled_swiglu(float gate, float up, float prob) {
  return __fmul_rn(__fmul_rn(__fmul_rn(gate, sigmoid(gate)), up), prob);
}

// And act, which has its operations in common with them: of asm the compiler computes none once for two.
struct ScaledSwigluGradient {
  float dgate, dup, dprob, act;
};

// silu'(g) = s + g s (1 - s) with s = sigmoid(g).
__device__ __forceinline__ ScaledSwigluGradient scaled_swiglu_gradient(float dact, float gate, float up,
                                                                       float prob) {
  const float s = sigmoid(gate);
  const float silu = __fmul_rn(gate, s);
  const float dsilu = __fmaf_rn(silu, __fadd_rn(1.0f, -s), s);
  const float scaled = __fmul_rn(dact, prob);
  const float product = __fmul_rn(silu, up);
  return {__fmul_rn(__fmul_rn(scaled, up), dsilu), __fmul_rn(scaled, silu), __fmul_rn(dact, product),
          __fmul_rn(product, prob)};
}

}  // namespace biomoe::cuda
