// What the host side of the kernels shares: types, alignment, the shape of launches, scratch memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "biomoe/backend/cuda/state.h"

namespace biomoe::cuda {

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

inline cudaStream_t stream_of(const Context& ctx) {
  return static_cast<cudaStream_t>(ctx.state ? ctx.state->stream : ctx.stream);
}

inline Arena& scratch_of(const Context& ctx, const char* op) {
  BM_CHECK(ctx.scratch != nullptr, "{}: needs scratch memory", op);
  return *ctx.scratch;
}

// body(T{}) with the type of the elements.
template <typename Body>
void with_type(DType dtype, const Body& body) {
  BM_CHECK(dtype == DType::kF32 || dtype == DType::kBF16, "no kernel for {}", dtype_name(dtype));
  if (dtype == DType::kBF16) {
    body(__nv_bfloat16{});
  } else {
    body(float{});
  }
}

template <typename T>
T* data_of(const TensorView& view) {
  return static_cast<T*>(view.data);
}

// Elements that a thread takes at a time where vectors_fit.
inline constexpr int kVector = 8;

// Every row of the given views (absent ones aside) is whole vectors at 16-byte addresses.
inline bool vectors_fit(std::initializer_list<TensorView> views) {
  return std::all_of(views.begin(), views.end(), [](const TensorView& view) {
    if (!view) return true;
    const bool one_row = view.shape.rank() < 2;
    const int64_t width = one_row ? view.num_elements() : view.row_elements();
    const size_t stride = one_row ? 0 : static_cast<size_t>(view.row_stride) * dtype_size(view.dtype);
    return width % kVector == 0 && stride % 16 == 0 && reinterpret_cast<uintptr_t>(view.data) % 16 == 0;
  });
}

// body(std::integral_constant<int, V>) with kVector or 1.
template <typename Body>
void with_vector(bool fits, const Body& body) {
  if (fits) {
    body(std::integral_constant<int, kVector>{});
  } else {
    body(std::integral_constant<int, 1>{});
  }
}

struct Grid {
  dim3 blocks;
  dim3 threads;
};

// A block of 256 threads takes as many rows as leave each thread about two of a row's `items`; rows along y
// within the block, and row blockIdx.x * blockDim.y + threadIdx.y.
inline Grid row_grid(int64_t rows, int64_t items) {
  constexpr unsigned kThreads = 256;
  const auto half = static_cast<unsigned>(std::clamp<int64_t>(ceil_div(items, 2), 1, kThreads));
  const unsigned x = std::bit_ceil(half);
  const unsigned y = kThreads / x;
  return {dim3(static_cast<unsigned>(ceil_div(rows, y))), dim3(x, y)};
}

}  // namespace biomoe::cuda
