// Four by four single-precision elements, exchanged in registers.
#pragma once

#include <array>
#include <cstring>

namespace biomoe::cpu {

typedef float Quad __attribute__((vector_size(16)));

inline Quad load_quad(const float* from) {
  Quad quad;
  std::memcpy(&quad, from, sizeof(quad));
  return quad;
}

inline void store_quad(float* to, Quad quad) {
  std::memcpy(to, &quad, sizeof(quad));
}

// Element i of result j is element j of rows[i].
inline std::array<Quad, 4> transposed(const std::array<Quad, 4>& rows) {
  const auto& [a, b, c, d] = rows;
  const Quad ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5),
             ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const Quad cd_low = __builtin_shufflevector(c, d, 0, 4, 1, 5),
             cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  return {__builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5),
          __builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7),
          __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5),
          __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7)};
}

}  // namespace biomoe::cpu
