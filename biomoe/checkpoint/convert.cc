#include "biomoe/checkpoint/convert.h"

#include <cmath>
#include <cstring>

#include "biomoe/core/error.h"

namespace biomoe {
namespace {

template <typename Decode>
void decode_16(const void* source, float* destination, size_t count, Decode decode) {
  const auto* bytes = static_cast<const uint8_t*>(source);
  for (size_t i = 0; i < count; ++i) {
    uint16_t bits;
    std::memcpy(&bits, bytes + 2 * i, sizeof(bits));
    destination[i] = decode(bits);
  }
}

template <typename Encode>
std::optional<size_t> encode_16(const float* source, void* destination, size_t count, uint16_t infinity,
                                Encode encode) {
  auto* bytes = static_cast<uint8_t*>(destination);
  std::optional<size_t> overflow;
  for (size_t i = 0; i < count; ++i) {
    const uint16_t bits = encode(source[i]);
    if ((bits & 0x7fffu) == infinity && std::isfinite(source[i]) && !overflow) overflow = i;
    std::memcpy(bytes + 2 * i, &bits, sizeof(bits));
  }
  return overflow;
}

}  // namespace

bool is_float_type(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16;
}

void convert_to_f32(DType from, const void* source, float* destination, size_t count) {
  switch (from) {
    case DType::kF32:
      if (count) std::memcpy(destination, source, count * sizeof(float));
      return;
    case DType::kBF16:
      return decode_16(source, destination, count, float_from_bf16);
    case DType::kF16:
      return decode_16(source, destination, count, float_from_f16);
    default:
      throw failure("{} is not converted to F32", dtype_name(from));
  }
}

std::optional<size_t> convert_from_f32(DType to, const float* source, void* destination, size_t count) {
  switch (to) {
    case DType::kF32:
      if (count) std::memcpy(destination, source, count * sizeof(float));
      return std::nullopt;
    case DType::kBF16:
      return encode_16(source, destination, count, 0x7f80u, bf16_from_float);
    case DType::kF16:
      return encode_16(source, destination, count, 0x7c00u, f16_from_float);
    default:
      throw failure("F32 is not converted to {}", dtype_name(to));
  }
}

}  // namespace biomoe
