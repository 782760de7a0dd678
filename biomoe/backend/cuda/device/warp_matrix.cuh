// Eight by eight matrices of 16-bit elements between registers and shared memory (ldmatrix, stmatrix), in
// boxes as the copy engine lays them out with the 128-byte swizzle; and packing of BF16 pairs.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace biomoe::cuda {

// Registers of four matrices: a 16 x 16 block, as (rows 0-7, columns 0-7), (rows 8-15, columns 0-7), (rows
// 0-7, columns 8-15), (rows 8-15, columns 8-15). Lane t holds elements (t / 4, 2 (t % 4)) and its right
// neighbour of each.
struct MatrixBlock {
  uint32_t r[4];
};

// Address of the 16-byte chunk `chunk` (0..7) of row `row` of a box of 128-byte rows.
__device__ __forceinline__ uint32_t swizzled_chunk(uint32_t box, int row, int chunk) {
  return box + static_cast<uint32_t>(row * 128 + ((chunk ^ (row & 7)) << 4));
}

// Address that lane `lane` gives to load_block and store_block for the block at (row, 8 chunk) of a box.
__device__ __forceinline__ uint32_t block_address(uint32_t box, int row, int chunk, int lane) {
  return swizzled_chunk(box, row + (lane & 15), chunk + (lane >> 4));
}

__device__ __forceinline__ void store_block(uint32_t address, const MatrixBlock& block) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(block.r[0]), "r"(block.r[1]), "r"(block.r[2]), "r"(block.r[3])
               : "memory");
}

__device__ __forceinline__ MatrixBlock load_block(uint32_t address) {
  MatrixBlock block;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(block.r[0]), "=r"(block.r[1]), "=r"(block.r[2]), "=r"(block.r[3])
               : "r"(address)
               : "memory");
  return block;
}

// Rounds to nearest even; `low` in the low half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ float low_bf16(uint32_t packed) {
  return __uint_as_float(packed << 16);
}
__device__ __forceinline__ float high_bf16(uint32_t packed) {
  return __uint_as_float(packed & 0xFFFF0000u);
}

}  // namespace biomoe::cuda
