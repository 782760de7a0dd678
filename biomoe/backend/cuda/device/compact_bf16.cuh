// quant/compact_bf16.h in registers, two numbers of 16 bits at a time.
#pragma once

#include "biomoe/backend/cuda/device/vector.cuh"
#include "biomoe/quant/compact_bf16.h"

namespace biomoe::cuda {

// The largest exponent of eight numbers.
__device__ __forceinline__ uint32_t largest_exponent(const Pack<bf16, 8>& x) {
  uint32_t largest = 0;
#pragma unroll
  for (const unsigned word : x.words) largest = __vmaxu2(largest, word & 0x7fff7fffu);
  return max(largest & 0xffffu, largest >> 16) >> 7;
}

__device__ __forceinline__ void make_compact(const Pack<bf16, 8>& x, uint32_t exponent, uint32_t& low_first,
                                             uint32_t& low_last, uint32_t& high) {
  const uint32_t base = CompactBf16::base(exponent) * 0x10001u;
  uint32_t codes[4];
  high = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    codes[i] = (__vmaxu2(x.words[i] & 0x7fff7fffu, base) - base) | (x.words[i] >> 4 & 0x08000800u);
    high |= (codes[i] >> 8 & 0x000f000fu) << 4 * i;
  }
  low_first = __byte_perm(codes[0], codes[1], 0x6420);
  low_last = __byte_perm(codes[2], codes[3], 0x6420);
}

__device__ __forceinline__ Pack<bf16, 8> from_compact(uint32_t low_first, uint32_t low_last, uint32_t high,
                                                      uint32_t exponent) {
  const uint32_t base = CompactBf16::base(exponent);
  Pack<bf16, 8> x;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t low = __byte_perm(i < 2 ? low_first : low_last, 0, i % 2 == 0 ? 0x4140 : 0x4342);
    const uint32_t above = high >> 4 * i & 0x000f000fu;
    const uint32_t magnitudes = low | (above & 0x00070007u) << 8;
    // A magnitude that is not 0 is raised: both halves at once, since no product or sum has more than 16
    // bits.
    x.words[i] = (magnitudes + __vminu2(magnitudes, 0x00010001u) * base) | (above & 0x00080008u) << 12;
  }
  return x;
}

// The planes of quant/compact_bf16.h.
struct CompactPlanes {
  uint8_t* data;
  int64_t rows, features;

  __device__ CompactLayout layout() const { return {rows, features}; }
  __device__ uint4* low(int64_t row, int64_t group) const {
    return reinterpret_cast<uint4*>(data) + row * layout().groups() + group;
  }
  __device__ uint2* high(int64_t row, int64_t group) const {
    return reinterpret_cast<uint2*>(data + layout().high_plane()) + row * layout().groups() + group;
  }
  // Of four rows from `row` on, a byte each: of the gates, and of the ups.
  __device__ uint2* exponents(int64_t row, int64_t group) const {
    return reinterpret_cast<uint2*>(data + layout().exponent_plane()) + row / 4 * layout().groups() + group;
  }

  // Of eight features of four rows.
  __device__ __forceinline__ void store_four(int64_t row, int64_t group, const Pack<bf16, 8> (&gate)[4],
                                             const Pack<bf16, 8> (&up)[4]) const {
    uint2 exponent = make_uint2(0, 0);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t of_gate = largest_exponent(gate[i]), of_up = largest_exponent(up[i]);
      exponent.x |= of_gate << 8 * i;
      exponent.y |= of_up << 8 * i;
      uint4 low_bits;
      uint2 high_bits;
      make_compact(gate[i], of_gate, low_bits.x, low_bits.y, high_bits.x);
      make_compact(up[i], of_up, low_bits.z, low_bits.w, high_bits.y);
      __stcs(low(row + i, group), low_bits);
      __stcs(high(row + i, group), high_bits);
    }
    __stcs(exponents(row, group), exponent);
  }
  __device__ __forceinline__ void load_four(int64_t row, int64_t group, Pack<bf16, 8> (&gate)[4],
                                            Pack<bf16, 8> (&up)[4]) const {
    uint4 low_bits[4];
    uint2 high_bits[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // all loads are under way before the first is used
      low_bits[i] = __ldcs(low(row + i, group));
      high_bits[i] = __ldcs(high(row + i, group));
    }
    const uint2 exponent = __ldcs(exponents(row, group));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      gate[i] = from_compact(low_bits[i].x, low_bits[i].y, high_bits[i].x, exponent.x >> 8 * i & 0xffu);
      up[i] = from_compact(low_bits[i].z, low_bits[i].w, high_bits[i].y, exponent.y >> 8 * i & 0xffu);
    }
  }
};

}  // namespace biomoe::cuda
