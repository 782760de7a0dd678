// CUTLASS's grouped block-scaled product (as in its example 75) of MXFP8 operands, and what fills its arrays
// of pointers and layouts on the device.
#pragma once

#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cute/tensor.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/dispatch_policy.hpp>
#include <cutlass/gemm/group_array_problem_shape.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include <type_traits>

#include "biomoe/backend/cuda/gemm/sm100_mxfp8_kernels.h"
#include "biomoe/backend/cuda/gemm/sm100_scale_layout.cuh"

namespace biomoe::cuda::sm100 {

// Of one multiprocessor: 128 rows, which is what segments are padded to.
using OutputTile = cute::Shape<cute::_128, cute::_256, cute::_128>;
using Cluster = cute::Shape<cute::_1, cute::_1, cute::_1>;

template <typename Output>
struct Mxfp8Gemm {
  using Operand = cutlass::mx_float8_t<cutlass::float_e4m3_t>;
  using RowMajor = cutlass::layout::RowMajor;
  using ColumnMajor = cutlass::layout::ColumnMajor;
  static constexpr int kOperandAlignment = 16;
  static constexpr int kOutputAlignment = 16 / static_cast<int>(sizeof(Output));

  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm100, cutlass::arch::OpClassBlockScaledTensorOp, OutputTile, Cluster,
      cute::Shape<cute::_128, cute::_64>, float, float, Output, RowMajor*, kOutputAlignment, Output,
      RowMajor*, kOutputAlignment, cutlass::epilogue::PtrArrayTmaWarpSpecialized1Sm>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm100, cutlass::arch::OpClassBlockScaledTensorOp, Operand, RowMajor*, kOperandAlignment,
      Operand, ColumnMajor*, kOperandAlignment, float, OutputTile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename Epilogue::SharedStorage))>,
      cutlass::gemm::KernelPtrArrayTmaWarpSpecialized1SmMxf8f6f4Sm100>::CollectiveOp;

  using Extent = cute::Shape<int, int, int>;
  using Kernel =
      cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<Extent>, Mainloop, Epilogue>;
  using Device = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;
  using Arguments = typename Device::Arguments;

  using Code = typename Mainloop::ArrayElementA;
  using Scale = typename Mainloop::ElementSF;
  static_assert(sizeof(Code) == 1 && sizeof(Scale) == 1 &&
                std::is_same_v<typename Mainloop::Sm1xxBlkScaledConfig, ScaleConfig>);

  // One of each for every expert, on the device.
  struct Arrays {
    Extent* extents;
    const Code **a, **b;
    const Scale **a_scales, **b_scales;
    Output** d;
    typename Mainloop::InternalStrideA* a_stride;
    typename Mainloop::InternalStrideB* b_stride;
    typename Epilogue::InternalStrideD* d_stride;
    typename Mainloop::InternalLayoutSFA* a_scale_layout;
    typename Mainloop::InternalLayoutSFB* b_scale_layout;
  };

  // Of `experts` elements each, from `memory` on (null to count); returns the bytes they take.
  static int64_t place(int experts, void* memory, Arrays* arrays) {
    constexpr int64_t kAlignment = 128;
    int64_t used = 0;
    const auto place_one = [&](auto** array) {
      *array =
          reinterpret_cast<std::remove_reference_t<decltype(**array)>*>(static_cast<char*>(memory) + used);
      const int64_t bytes = experts * static_cast<int64_t>(sizeof(**array));
      used += (bytes + kAlignment - 1) / kAlignment * kAlignment;
    };
    place_one(&arrays->extents);
    place_one(&arrays->a);
    place_one(&arrays->b);
    place_one(&arrays->a_scales);
    place_one(&arrays->b_scales);
    place_one(&arrays->d);
    place_one(&arrays->a_stride);
    place_one(&arrays->b_stride);
    place_one(&arrays->d_stride);
    place_one(&arrays->a_scale_layout);
    place_one(&arrays->b_scale_layout);
    return used;
  }

  static Arguments arguments(const Arrays& arrays, int experts, int multiprocessors, bool accumulate) {
    Arguments arguments{};
    arguments.mode = cutlass::gemm::GemmUniversalMode::kGrouped;
    arguments.problem_shape = {experts, arrays.extents, nullptr};
    arguments.mainloop.ptr_A = arrays.a;
    arguments.mainloop.dA = arrays.a_stride;
    arguments.mainloop.ptr_B = arrays.b;
    arguments.mainloop.dB = arrays.b_stride;
    arguments.mainloop.ptr_SFA = arrays.a_scales;
    arguments.mainloop.layout_SFA = arrays.a_scale_layout;
    arguments.mainloop.ptr_SFB = arrays.b_scales;
    arguments.mainloop.layout_SFB = arrays.b_scale_layout;
    arguments.epilogue.thread.alpha = 1.0f;
    arguments.epilogue.thread.beta = accumulate ? 1.0f : 0.0f;
    arguments.epilogue.ptr_C = const_cast<const Output**>(arrays.d);
    arguments.epilogue.dC = arrays.d_stride;
    arguments.epilogue.ptr_D = arrays.d;
    arguments.epilogue.dD = arrays.d_stride;
    arguments.hw_info.sm_count = multiprocessors;
    return arguments;
  }
};

// What one expert's part is, as CUTLASS is told. The layout of scales has the part's extents and the strides
// of the whole matrix.
template <typename Output>
__device__ void set_expert(const typename Mxfp8Gemm<Output>::Arrays& arrays, const GroupedProduct& product,
                           const ExpertProduct& part, int e) {
  using Gemm = Mxfp8Gemm<Output>;
  using Code = typename Gemm::Code;
  using Scale = typename Gemm::Scale;
  const int m = static_cast<int>(part.m), n = static_cast<int>(part.n), k = static_cast<int>(part.k);
  arrays.extents[e] = cute::make_shape(m, n, k);
  arrays.a[e] = reinterpret_cast<const Code*>(product.a.codes + part.a_codes);
  arrays.b[e] = reinterpret_cast<const Code*>(product.b.codes + part.b_codes);
  arrays.a_scales[e] = reinterpret_cast<const Scale*>(product.a.scales + part.a_scales);
  arrays.b_scales[e] = reinterpret_cast<const Scale*>(product.b.scales + part.b_scales);
  arrays.d[e] = static_cast<Output*>(product.d) + part.d;
  cute::get<0>(arrays.a_stride[e]) = part.a_stride;
  cute::get<0>(arrays.b_stride[e]) = part.b_stride;
  cute::get<0>(arrays.d_stride[e]) = part.d_stride;
  arrays.a_scale_layout[e] = scale_layout(m, k, part.a_scale_tile_stride);
  arrays.b_scale_layout[e] = scale_layout(n, k, part.b_scale_tile_stride);
}

template <typename Output>
__global__ void set_experts_kernel(typename Mxfp8Gemm<Output>::Arrays arrays, GroupedProduct product) {
  const int e = static_cast<int>(threadIdx.x);
  if (e >= product.experts) return;
  const int64_t begin = product.offsets ? product.offsets[e] : 0;
  const int64_t end = product.offsets ? product.offsets[e + 1] : product.capacity;
  set_expert<Output>(arrays, product, expert_product(product, e, begin, end), e);
}

template <typename Output>
int64_t kernel_workspace_bytes(int experts, int multiprocessors) {
  using Gemm = Mxfp8Gemm<Output>;
  typename Gemm::Arrays arrays{};
  const int64_t bytes = Gemm::place(experts, nullptr, &arrays);
  const auto arguments = Gemm::arguments(arrays, experts, multiprocessors, false);
  return bytes + static_cast<int64_t>(Gemm::Device::get_workspace_size(arguments));
}

template <typename Output>
cudaError_t launch_kernel(const GroupedProduct& product, int multiprocessors, void* workspace,
                          cudaStream_t stream) {
  using Gemm = Mxfp8Gemm<Output>;
  typename Gemm::Arrays arrays{};
  const int64_t placed = Gemm::place(product.experts, workspace, &arrays);
  set_experts_kernel<Output><<<1, kMaxExperts, 0, stream>>>(arrays, product);
  cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  typename Gemm::Device gemm;
  auto status = gemm.initialize(Gemm::arguments(arrays, product.experts, multiprocessors, product.accumulate),
                                static_cast<char*>(workspace) + placed, stream);
  if (status == cutlass::Status::kSuccess) status = gemm.run(stream);
  error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  return status == cutlass::Status::kSuccess ? cudaSuccess : cudaErrorLaunchFailure;
}

}  // namespace biomoe::cuda::sm100
