#include "biomoe/ops/fill.h"

#include "biomoe/backend/cuda/device/vector.cuh"
#include "biomoe/backend/cuda/launch.h"

namespace biomoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMaxBlocks = 1056;  // eight a multiprocessor of the largest Hopper

__device__ __forceinline__ int nonfinite(float value) {
  return (__float_as_uint(value) & 0x7f800000u) == 0x7f800000u;
}

template <typename T>
__global__ void count_kernel(const T* x, int64_t vectors, int64_t elements, unsigned long long* count) {
  const int64_t thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t threads = int64_t{gridDim.x} * kThreads;
  int found = 0;
  for (int64_t i = thread; i < vectors; i += threads) {
    const Pack<T, kVector> pack = load<kVector, Reuse::kStream>(x + i * kVector);
#pragma unroll
    for (int j = 0; j < kVector; ++j) found += nonfinite(pack[j]);
  }
  for (int64_t i = vectors * kVector + thread; i < elements; i += threads) found += nonfinite(to_float(x[i]));
  found = static_cast<int>(__reduce_add_sync(0xffffffffu, static_cast<unsigned>(found)));
  if (threadIdx.x % 32 == 0 && found > 0) atomicAdd(count, static_cast<unsigned long long>(found));
}

}  // namespace

void fill_zero(Context& ctx, const FillZeroArgs& args) {
  if (args.x.bytes() == 0) return;
  check(cudaMemsetAsync(args.x.data, 0, args.x.bytes(), stream_of(ctx)), "fill_zero");
}

void count_nonfinite(Context& ctx, const CountNonfiniteArgs& args) {
  check(cudaMemsetAsync(args.count_1.data, 0, sizeof(int64_t), stream_of(ctx)), "count_nonfinite");
  const int64_t elements = args.x.num_elements();
  if (elements == 0) return;
  const bool aligned = reinterpret_cast<uintptr_t>(args.x.data) % 16 == 0;
  const int64_t vectors = aligned ? elements / kVector : 0;
  const int64_t blocks = std::min(kMaxBlocks, ceil_div(ceil_div(elements, kVector), kThreads));
  with_type(args.x.dtype, [&](auto type) {
    using T = decltype(type);
    count_kernel<T><<<static_cast<unsigned>(blocks), kThreads, 0, stream_of(ctx)>>>(
        data_of<T>(args.x), vectors, elements, reinterpret_cast<unsigned long long*>(args.count_1.i64()));
  });
  check_launch("count_nonfinite");
}

}  // namespace biomoe::cuda
