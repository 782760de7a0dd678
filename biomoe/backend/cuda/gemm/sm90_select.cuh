// Instantiates the kernel for every tiling.
#pragma once

#include "biomoe/backend/cuda/gemm/sm90_kernel.cuh"
#include "biomoe/backend/cuda/gemm/sm90_kernels.h"

namespace biomoe::cuda::sm90 {

template <class Config>
KernelChoice kernel_choice() {
  return {reinterpret_cast<const void*>(&grouped_gemm_kernel<Config>), Config::kSharedBytes};
}

template <Product kProduct>
KernelChoice select_kernel(const Tiling& tiling) {
  const bool pair = tiling.cluster == 2;
  if (tiling.schedule == TileSchedule::kCooperative) {
    return pair ? kernel_choice<Config<kProduct, TileSchedule::kCooperative, 2>>()
                : kernel_choice<Config<kProduct, TileSchedule::kCooperative, 1>>();
  }
  return pair ? kernel_choice<Config<kProduct, TileSchedule::kPingpong, 2>>()
              : kernel_choice<Config<kProduct, TileSchedule::kPingpong, 1>>();
}

}  // namespace biomoe::cuda::sm90
