// The bulk tensor copy engine (TMA) of sm_90: boxes of three-dimensional tensor maps between global and
// shared memory. Coordinates count elements, innermost first; elements outside of the tensor read as zero and
// are not written. Each call is made by one thread.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace biomoe::cuda {

struct BoxCoordinates {
  int c0, c1, c2;
};

__device__ __forceinline__ void tma_prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Loads a box and counts its bytes on `barrier`.
__device__ __forceinline__ void tma_load(uint32_t destination, const CUtensorMap* map, uint32_t barrier,
                                         BoxCoordinates at) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], "
      "[%2];" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(at.c0), "r"(at.c1), "r"(at.c2)
      : "memory");
}

// Loads a box into the same place of every block in `block_mask`, and counts its bytes on the barrier of
// each.
__device__ __forceinline__ void tma_load_multicast(uint32_t destination, const CUtensorMap* map,
                                                   uint32_t barrier, BoxCoordinates at, uint16_t block_mask) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4, %5}], [%2], %6;" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(at.c0), "r"(at.c1), "r"(at.c2), "h"(block_mask)
      : "memory");
}

// Loads consecutive bytes, a multiple of 16 at addresses that are, and counts them on `barrier`.
__device__ __forceinline__ void bulk_load(uint32_t destination, const void* source, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          destination),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// Loads one word.
__device__ __forceinline__ void load_word(uint32_t destination, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(destination), "l"(source) : "memory");
}

// Arrives at `barrier` once every earlier load_word of this thread is there.
__device__ __forceinline__ void arrive_with_words(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void tma_store(const CUtensorMap* map, uint32_t source, BoxCoordinates at) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
               "r"(source), "r"(at.c0), "r"(at.c1), "r"(at.c2)
               : "memory");
}

// Adds the box to global memory, in the element type of the map.
__device__ __forceinline__ void tma_reduce_add(const CUtensorMap* map, uint32_t source, BoxCoordinates at) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(
          map),
      "r"(source), "r"(at.c0), "r"(at.c1), "r"(at.c2)
      : "memory");
}

__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most `kPending` of this thread's newest store groups still read shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until this thread's stores are complete.
__device__ __forceinline__ void bulk_wait_all() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Orders this thread's ordinary accesses of shared memory before later ones of the copy engine and tensor
// cores.
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace biomoe::cuda
