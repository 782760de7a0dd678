// Element types of tensors, and conversions between the 16- and 32-bit floating-point formats.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace biomoe {

enum class DType : uint8_t { kF32, kBF16, kF16, kF64, kI32, kI64, kU8, kU16 };

size_t dtype_size(DType dtype);            // bytes an element
std::string_view dtype_name(DType dtype);  // as safetensors spells it: "F32", "BF16", ...

// IEEE 754 binary32 -> bfloat16, round to nearest even; NaN stays NaN (quiet), infinities stay.
inline uint16_t bf16_from_float(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x0040u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float float_from_bf16(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// IEEE 754 binary32 <-> binary16, round to nearest even, with subnormals, infinities and NaN.
uint16_t f16_from_float(float value);
float float_from_f16(uint16_t bits);

}  // namespace biomoe
