// Warpgroup matrix multiply-accumulate (wgmma) of sm_90a on BF16 or E4M3 operands in shared memory, FP32
// accumulators in registers. The four warps of a warpgroup call these together.
//
// Operands lie in shared memory as the copy engine writes them with the 128-byte swizzle: rows of 128 bytes,
// groups of eight rows of 1024 bytes, 1024-byte aligned. K-major: a row is one m (or n) and 64 values of k,
// or 128 codes; codes have no other. MN-major: a row is one k and 64 values of m (or n).
#pragma once

#include <cstdint>

namespace biomoe::cuda {

constexpr int kWgmmaK = 16;       // of BF16
constexpr int kWgmmaCodesK = 32;  // of E4M3

// Matrix descriptor (PTX ISA, "asynchronous warpgroup level matrix shared memory layout"): address, leading
// and stride byte offsets in units of 16 bytes, and 1 in the top two bits for the 128-byte swizzle. The
// stride is from one group of eight rows to the next; `leading_bytes`, used by MN-major operands only, from
// one block of 64 values of m (or n) to the next.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address, uint32_t leading_bytes) {
  constexpr uint64_t kStride = 1024 >> 4;
  constexpr uint64_t kSwizzle128 = 1;
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | (static_cast<uint64_t>(leading_bytes >> 4) << 16) |
         (kStride << 32) | (kSwizzle128 << 62);
}

// What one step of kWgmmaK along k adds to a descriptor: 32 bytes within the row, or 16 rows.
template <bool kMnMajor>
constexpr uint64_t kWgmmaStepK = (kMnMajor ? kWgmmaK * 128 : kWgmmaK * 2) >> 4;

// Before the first wgmma, and after other accesses of its registers.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending of the newest groups are in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of the accumulators across this point.
template <int kCount>
__device__ __forceinline__ void pin_registers(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

#define BIOMOE_ACCUMULATORS(d, i)                                                                       \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]),           \
      "+f"(d[i + 6]), "+f"(d[i + 7]), "+f"(d[i + 8]), "+f"(d[i + 9]), "+f"(d[i + 10]), "+f"(d[i + 11]), \
      "+f"(d[i + 12]), "+f"(d[i + 13]), "+f"(d[i + 14]), "+f"(d[i + 15])

// d[64, 256] = a[64, 16] b[256, 16]^T, or with kAdd added to d: thread t of the warpgroup holds, for each
// block j of eight columns, d[4 j + 2 h + i] = element (16 (t / 32) + t % 32 / 4 + 8 h, 8 j + 2 (t % 4) + i).
template <bool kAMnMajor, bool kBMnMajor, bool kAdd>
__device__ __forceinline__ void wgmma_m64n256k16(float (&d)[128], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
      "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
      "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
      "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
      "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "
      "%128, %129, %130, 1, 1, %131, %132;"
      : BIOMOE_ACCUMULATORS(d, 0), BIOMOE_ACCUMULATORS(d, 16), BIOMOE_ACCUMULATORS(d, 32),
        BIOMOE_ACCUMULATORS(d, 48), BIOMOE_ACCUMULATORS(d, 64), BIOMOE_ACCUMULATORS(d, 80),
        BIOMOE_ACCUMULATORS(d, 96), BIOMOE_ACCUMULATORS(d, 112)
      : "l"(a), "l"(b), "n"(kAdd ? 1 : 0), "n"(kAMnMajor ? 1 : 0), "n"(kBMnMajor ? 1 : 0));
}

// d[64, 128] = a[64, 32] b[128, 32]^T of E4M3 codes, or with kAdd added to d; d lies as above. The hardware
// sums with fewer bits than FP32 has.
template <bool kAdd>
__device__ __forceinline__ void wgmma_e4m3_m64n128k32(float (&d)[64], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, %66, 1, 1;"
      : BIOMOE_ACCUMULATORS(d, 0), BIOMOE_ACCUMULATORS(d, 16), BIOMOE_ACCUMULATORS(d, 32),
        BIOMOE_ACCUMULATORS(d, 48)
      : "l"(a), "l"(b), "n"(kAdd ? 1 : 0));
}

#undef BIOMOE_ACCUMULATORS

// Moves registers between the warpgroups of a block: all warps of a warpgroup together.
template <int kRegisters>
__device__ __forceinline__ void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void claim_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace biomoe::cuda
