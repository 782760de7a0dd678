// Elements as kernels read and write them: several at a time in 16-byte accesses, in fp32 arithmetic.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace biomoe::cuda {

using bf16 = __nv_bfloat16;

__device__ __forceinline__ float to_float(float value) {
  return value;
}
__device__ __forceinline__ float to_float(bf16 value) {
  return __bfloat162float(value);
}
template <typename T>
__device__ __forceinline__ T from_float(float value) {
  if constexpr (sizeof(T) == 2) {
    return __float2bfloat16_rn(value);
  } else {
    return value;
  }
}

// V elements in registers, as they lie in memory.
template <typename T, int V>
struct Pack {
  static_assert(V * sizeof(T) % 16 == 0, "whole 16-byte accesses");
  static constexpr int kWords = V * static_cast<int>(sizeof(T)) / 4;
  unsigned words[kWords];

  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (sizeof(T) == 2) {
      return __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
    } else {
      return __uint_as_float(words[i]);
    }
  }
  __device__ __forceinline__ void set(const float (&values)[V]) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      if constexpr (sizeof(T) == 2) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(values[2 * w], values[2 * w + 1]);
        words[w] = *reinterpret_cast<const unsigned*>(&pair);
      } else {
        words[w] = __float_as_uint(values[w]);
      }
    }
  }
};

template <typename T>
struct Pack<T, 1> {
  T value;
  __device__ __forceinline__ float operator[](int) const { return to_float(value); }
  __device__ __forceinline__ void set(const float (&values)[1]) { value = from_float<T>(values[0]); }
};

// kStream: data that is not used again soon, which leaves the cache first.
enum class Reuse { kKeep, kStream };

template <int V, Reuse kReuse = Reuse::kKeep, typename T>
__device__ __forceinline__ Pack<T, V> load(const T* from) {
  Pack<T, V> pack;
  if constexpr (V == 1) {
    pack.value = *from;
  } else {
    const auto* lines = reinterpret_cast<const uint4*>(from);
#pragma unroll
    for (int i = 0; i < Pack<T, V>::kWords / 4; ++i) {
      const uint4 line = kReuse == Reuse::kStream ? __ldcs(lines + i) : lines[i];
      pack.words[4 * i] = line.x;
      pack.words[4 * i + 1] = line.y;
      pack.words[4 * i + 2] = line.z;
      pack.words[4 * i + 3] = line.w;
    }
  }
  return pack;
}

template <Reuse kReuse = Reuse::kKeep, typename T, int V>
__device__ __forceinline__ void store(T* to, const Pack<T, V>& pack) {
  if constexpr (V == 1) {
    *to = pack.value;
  } else {
    auto* lines = reinterpret_cast<uint4*>(to);
#pragma unroll
    for (int i = 0; i < Pack<T, V>::kWords / 4; ++i) {
      const uint4 line =
          make_uint4(pack.words[4 * i], pack.words[4 * i + 1], pack.words[4 * i + 2], pack.words[4 * i + 3]);
      if constexpr (kReuse == Reuse::kStream) {
        __stcs(lines + i, line);
      } else {
        lines[i] = line;
      }
    }
  }
}

// Rounded to T.
template <Reuse kReuse = Reuse::kKeep, typename T, int V>
__device__ __forceinline__ void store(T* to, const float (&values)[V]) {
  Pack<T, V> pack;
  pack.set(values);
  store<kReuse>(to, pack);
}

}  // namespace biomoe::cuda
