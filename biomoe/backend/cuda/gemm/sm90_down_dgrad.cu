#include "biomoe/backend/cuda/gemm/sm90_select.cuh"

namespace biomoe::cuda::sm90 {
namespace {

constexpr int kSumThreads = 256;

// A warp a row; the order of the sum depends on n_tiles only.
__global__ void sum_dprob_kernel(const float* partials, const int64_t* offsets, int experts, int n_tiles,
                                 float* dprob) {
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * kSumThreads + threadIdx.x) / 32;
  const int lane = threadIdx.x % 32;
  if (row >= offsets[experts]) return;
  float sum = 0.0f;
  for (int tile = lane; tile < n_tiles; tile += 32) sum += partials[row * n_tiles + tile];
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
  if (lane == 0) dprob[row] = sum;
}

}  // namespace

KernelChoice down_dgrad_kernel(const Tiling& tiling) {
  return select_kernel<Product::kDownDgrad>(tiling);
}

cudaError_t launch_sum_dprob(const KernelParams& params, float* dprob, cudaStream_t stream) {
  const int64_t blocks = (params.capacity * 32 + kSumThreads - 1) / kSumThreads;
  sum_dprob_kernel<<<static_cast<unsigned>(blocks), kSumThreads, 0, stream>>>(
      params.partials, params.offsets, params.experts, params.n_tiles, dprob);
  return cudaGetLastError();
}

}  // namespace biomoe::cuda::sm90
