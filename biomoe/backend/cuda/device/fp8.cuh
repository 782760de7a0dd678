// Four 8-bit codes at a time: the conversions of quant/formats.h in every bit, by the GPU's instructions
// where it has them (from compute capability 8.9 on).
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "biomoe/quant/formats.h"

namespace biomoe::cuda {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890

template <Fp8Format kFormat>
__device__ __forceinline__ uint32_t encode_pair(float low, float high) {
  uint16_t pair;
  if constexpr (kFormat == Fp8Format::kE4M3) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  }
  return pair;
}

template <Fp8Format kFormat>
__device__ __forceinline__ float2 decode_pair(uint32_t pair) {
  __half2_raw halves;
  uint32_t both;
  if constexpr (kFormat == Fp8Format::kE4M3) {
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(both) : "h"(static_cast<uint16_t>(pair)));
  } else {
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(both) : "h"(static_cast<uint16_t>(pair)));
  }
  halves.x = static_cast<uint16_t>(both);
  halves.y = static_cast<uint16_t>(both >> 16);
  return __half22float2(halves);
}

#else

template <Fp8Format kFormat>
__device__ __forceinline__ uint32_t encode_pair(float low, float high) {
  return fp8::encode(low, kFormat) | static_cast<uint32_t>(fp8::encode(high, kFormat)) << 8;
}

template <Fp8Format kFormat>
__device__ __forceinline__ float2 decode_pair(uint32_t pair) {
  return {fp8::decode(static_cast<uint8_t>(pair), kFormat),
          fp8::decode(static_cast<uint8_t>(pair >> 8), kFormat)};
}

#endif

// Byte i is the code of values[i].
template <Fp8Format kFormat>
__device__ __forceinline__ uint32_t encode_four(const float (&values)[4]) {
  return encode_pair<kFormat>(values[0], values[1]) | encode_pair<kFormat>(values[2], values[3]) << 16;
}

template <Fp8Format kFormat>
__device__ __forceinline__ void decode_four(uint32_t codes, float (&values)[4]) {
  const float2 low = decode_pair<kFormat>(codes & 0xffffu), high = decode_pair<kFormat>(codes >> 16);
  values[0] = low.x;
  values[1] = low.y;
  values[2] = high.x;
  values[3] = high.y;
}

// Bytes of four rows of four columns to those of four columns of four rows.
__device__ __forceinline__ void transpose_bytes(uint32_t (&words)[4]) {
  const uint32_t low_01 = __byte_perm(words[0], words[1], 0x5140),
                 low_23 = __byte_perm(words[2], words[3], 0x5140);
  const uint32_t high_01 = __byte_perm(words[0], words[1], 0x7362),
                 high_23 = __byte_perm(words[2], words[3], 0x7362);
  words[0] = __byte_perm(low_01, low_23, 0x5410);
  words[1] = __byte_perm(low_01, low_23, 0x7632);
  words[2] = __byte_perm(high_01, high_23, 0x5410);
  words[3] = __byte_perm(high_01, high_23, 0x7632);
}

}  // namespace biomoe::cuda
