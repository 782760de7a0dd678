// Plain double-precision references for the grouped GEMM kernels, and comparison against them, on the device:
// a warp computes one element, all elements or a sample of them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "biomoe/backend/cuda/device/swiglu.cuh"

#define BENCH_CUDA(call)                                                                               \
  do {                                                                                                 \
    const cudaError_t status_ = (call);                                                                \
    if (status_ != cudaSuccess) {                                                                      \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(status_)); \
      std::exit(1);                                                                                    \
    }                                                                                                  \
  } while (false)

namespace bench {

using Bf16 = __nv_bfloat16;

// Unit roundoffs: 2^-p for p significant bits, of which BF16 has 8; one percent on top for what the reference
// itself lacks.
constexpr double kUnitBf16 = 1.01 / 256;
constexpr double kUnitFp32 = 1.01 / 16777216;

// Sums of a comparison. An element is bad when it is further from the reference than its own tolerance.
struct Comparison {
  double error2 = 0, reference2 = 0;
  double worst = 0;  // largest error as a multiple of its tolerance
  unsigned long long bad = 0, count = 0;
};

__device__ inline uint64_t mix(uint64_t v) {
  v += 0x9E3779B97F4A7C15ull;
  v = (v ^ (v >> 30)) * 0xBF58476D1CE4E5B9ull;
  v = (v ^ (v >> 27)) * 0x94D049BB133111EBull;
  return v ^ (v >> 31);
}

__device__ inline void atomic_max(double* where, double value) {  // of numbers that are not negative
  atomicMax(reinterpret_cast<unsigned long long*>(where),
            static_cast<unsigned long long>(__double_as_longlong(value)));
}

__device__ inline void compare(Comparison* result, double value, double reference, double tolerance) {
  const double error = value - reference;
  const bool good = fabs(error) <= tolerance;  // false for NaN
  atomicAdd(&result->error2, isfinite(error) ? error * error : 1e30);
  atomicAdd(&result->reference2, reference * reference);
  atomicAdd(&result->count, 1ull);
  if (!good) atomicAdd(&result->bad, 1ull);
  const double ratio =
      isfinite(error) ? (tolerance > 0 ? fabs(error) / tolerance : (error == 0 ? 0.0 : 1e9)) : 1e9;
  atomic_max(&result->worst, ratio);
}

__device__ inline double to_double(Bf16 v) {
  return static_cast<double>(__bfloat162float(v));
}
__device__ inline double to_double(float v) {
  return static_cast<double>(v);
}

// Which rows belong to which expert: -1 after the last segment.
struct Routing {
  const int64_t* offsets;
  const int32_t* row_expert;
  int64_t capacity;
  int experts;
};

enum class Form { kForward, kDgrad, kWgrad };

// out: [rows, columns] for kForward (a[row, :] . b[e][column, :]) and kDgrad (a[row, :] . b[e][:, column]),
// and [E, rows, columns] for kWgrad (a[segment e, row] . b[segment e, column]).
struct Product {
  Form form;
  const Bf16 *a, *b;
  int64_t rows, columns, inner;
  Routing routing;
};

// The sum and the sum of magnitudes, over the lanes of a warp.
__device__ inline void reference_element(const Product& p, int64_t expert, int64_t row, int64_t column,
                                         double* sum, double* magnitude) {
  const int lane = threadIdx.x % 32;
  const bool over_rows = p.form == Form::kWgrad;
  const int64_t begin = over_rows ? p.routing.offsets[expert] : 0;
  const int64_t end = over_rows ? p.routing.offsets[expert + 1] : p.inner;
  double s = 0, m = 0;
  for (int64_t k = begin + lane; k < end; k += 32) {
    const double a = to_double(over_rows ? p.a[k * p.rows + row] : p.a[row * p.inner + k]);
    double b;
    if (p.form == Form::kForward) {
      b = to_double(p.b[(expert * p.columns + column) * p.inner + k]);
    } else if (p.form == Form::kDgrad) {
      b = to_double(p.b[(expert * p.inner + k) * p.columns + column]);
    } else {
      b = to_double(p.b[k * p.columns + column]);
    }
    s += a * b;
    m += fabs(a * b);
  }
  for (int step = 16; step > 0; step /= 2) {
    s += __shfl_xor_sync(0xFFFFFFFFu, s, step);
    m += __shfl_xor_sync(0xFFFFFFFFu, m, step);
  }
  *sum = s;
  *magnitude = m;
}

// Compares `out` with the product, plus `before` where that is given. Tolerance: one rounding to T of the
// result (and of the product before the sum, for a BF16 sum), and 2^-18 of the sum of magnitudes for FP32
// accumulation.
template <typename T>
__global__ void compare_product_kernel(Product p, const T* out, const T* before, int64_t samples,
                                       Comparison* result) {
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  const int64_t warps = static_cast<int64_t>(gridDim.x) * blockDim.x / 32;
  const int64_t per_expert = p.rows * p.columns;
  const int64_t total = p.form == Form::kWgrad ? per_expert * p.routing.experts : per_expert;
  const double unit = sizeof(T) == 2 ? kUnitBf16 : kUnitFp32;
  for (int64_t i = warp; i < (samples < total ? samples : total); i += warps) {
    const int64_t index = samples < total ? static_cast<int64_t>(mix(i) % static_cast<uint64_t>(total)) : i;
    int64_t expert = index / per_expert;
    const int64_t row = index % per_expert / p.columns;
    const int64_t column = index % p.columns;
    if (p.form != Form::kWgrad) {
      expert = p.routing.row_expert[row];
      if (expert < 0) continue;
    }
    double product, magnitude;
    reference_element(p, expert, row, column, &product, &magnitude);
    if (threadIdx.x % 32 == 0) {
      const double start = before != nullptr ? to_double(before[index]) : 0.0;
      double tolerance = unit * fabs(product + start) + magnitude / 262144;
      if (before != nullptr) tolerance += 1.01 * unit * fabs(product);
      compare(result, to_double(out[index]), product + start, tolerance);
    }
  }
}

__device__ inline int64_t gate_column(int64_t feature) {
  return feature / 32 * 64 + feature % 32;
}

// act against gate_up as stored: within one rounding of the definition, and bitwise as the unfused formula
// has it.
__global__ void compare_act_kernel(const Bf16* gate_up, const float* prob, const Bf16* act, Routing routing,
                                   int64_t features, Comparison* result,
                                   unsigned long long* bit_differences) {
  const int64_t total = routing.capacity * features;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < total;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t row = i / features;
    if (routing.row_expert[row] < 0) continue;
    const int64_t at = row * 2 * features + gate_column(i % features);
    const float gate = __bfloat162float(gate_up[at]), up = __bfloat162float(gate_up[at + 32]);
    const Bf16 unfused = __float2bfloat16_rn(biomoe::cuda::scaled_swiglu(gate, up, prob[row]));
    if (__bfloat16_as_ushort(unfused) != __bfloat16_as_ushort(act[i])) atomicAdd(bit_differences, 1ull);
    if (mix(i) % 16 == 0) {
      const double exact = gate / (1.0 + exp(-static_cast<double>(gate))) * up * prob[row];
      compare(result, to_double(act[i]), exact, kUnitBf16 * fabs(exact) + 1e-30);
    }
  }
}

// dgate_up and dprob from dact, in double; a block a row.
__global__ void compare_swiglu_gradient_kernel(const Bf16* dact, const Bf16* gate_up, const float* prob,
                                               const Bf16* dgate_up, const float* dprob, Routing routing,
                                               int64_t features, Comparison* gradients, Comparison* probs) {
  __shared__ double sums[2][256];
  for (int64_t row = blockIdx.x; row < routing.capacity; row += gridDim.x) {
    if (routing.row_expert[row] < 0) continue;
    double sum = 0, magnitude = 0;
    for (int64_t f = threadIdx.x; f < features; f += blockDim.x) {
      const int64_t at = row * 2 * features + gate_column(f);
      const double g = to_double(gate_up[at]), u = to_double(gate_up[at + 32]),
                   d = to_double(dact[row * features + f]);
      const double s = 1.0 / (1.0 + exp(-g));
      sum += d * g * s * u;
      magnitude += fabs(d * g * s * u);
      if (mix(at) % 16 != 0) continue;
      const double scale = d * prob[row];
      const double dgate = scale * u * (s + g * s * (1.0 - s)), dup = scale * g * s;
      compare(gradients, to_double(dgate_up[at]), dgate,
              kUnitBf16 * fabs(dgate) + 1e-6 * fabs(scale * u) + 1e-30);
      compare(gradients, to_double(dgate_up[at + 32]), dup, kUnitBf16 * fabs(dup) + 1e-30);
    }
    sums[0][threadIdx.x] = sum;
    sums[1][threadIdx.x] = magnitude;
    __syncthreads();
    if (threadIdx.x == 0) {
      sum = magnitude = 0;
      for (unsigned i = 0; i < blockDim.x; ++i) {
        sum += sums[0][i];
        magnitude += sums[1][i];
      }
      compare(probs, dprob[row], sum, 1e-5 * magnitude);
    }
    __syncthreads();
  }
}

// A block for each value of square_sums: 16 rows by a tile's columns of dw[e].
__global__ void compare_square_sums_kernel(const Bf16* dw, const float* square_sums, int64_t out, int64_t in,
                                           int tile_columns, Comparison* result) {
  __shared__ double sums[256];
  const int64_t tiles = (in + tile_columns - 1) / tile_columns;
  const int64_t row_blocks = (out + 127) / 128 * 8;
  const int64_t expert = blockIdx.x / (row_blocks * tiles);
  const int64_t row_block = blockIdx.x / tiles % row_blocks;
  const int64_t tile = blockIdx.x % tiles;
  double sum = 0;
  for (int64_t i = threadIdx.x; i < 16 * tile_columns; i += blockDim.x) {
    const int64_t row = row_block * 16 + i / tile_columns, column = tile * tile_columns + i % tile_columns;
    if (row >= out || column >= in) continue;
    const double v = to_double(dw[(expert * out + row) * in + column]);
    sum += v * v;
  }
  sums[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (unsigned i = 1; i < blockDim.x; ++i) sum += sums[i];
  compare(result, square_sums[blockIdx.x], sum, 1e-5 * sum);
}

// Normal values in the real rows of every segment, zeros in their padding, NaN in the rows after the last.
__global__ void fill_rows_kernel(Bf16* data, int64_t columns, Routing routing, const int32_t* rows_valid,
                                 float scale, uint64_t seed) {
  const int64_t total = routing.capacity * columns;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < total;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t row = i / columns;
    const int expert = routing.row_expert[row];
    const uint64_t bits = mix(mix(seed) ^ static_cast<uint64_t>(i));
    const float radius = sqrtf(-2.0f * logf((static_cast<float>(bits >> 40) + 0.5f) / 16777216.0f));
    const float value = scale * radius * cospif(static_cast<float>(bits & 0xFFFFFF) / 8388608.0f);
    const bool real = expert >= 0 && row - routing.offsets[expert] < rows_valid[expert];
    data[i] = __float2bfloat16_rn(expert < 0 ? NAN : (real ? value : 0.0f));
  }
}

__global__ void fill_probs_kernel(float* data, Routing routing, const int32_t* rows_valid, uint64_t seed) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= routing.capacity) return;
  const int expert = routing.row_expert[row];
  const bool real = expert >= 0 && row - routing.offsets[expert] < rows_valid[expert];
  const float value = static_cast<float>(mix(mix(seed) ^ static_cast<uint64_t>(row)) >> 40) / 16777216.0f;
  data[row] = expert < 0 ? NAN : (real ? value : 0.0f);
}

__global__ inline void fill_kernel(float* data, int64_t count, float value) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    data[i] = value;
  }
}

template <typename T>
__global__ void fill_normal_kernel(T* data, int64_t count, float scale, uint64_t seed) {
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const uint64_t bits = mix(mix(seed) ^ static_cast<uint64_t>(i));
    const float radius = sqrtf(-2.0f * logf((static_cast<float>(bits >> 40) + 0.5f) / 16777216.0f));
    data[i] = static_cast<T>(scale * radius * cospif(static_cast<float>(bits & 0xFFFFFF) / 8388608.0f));
  }
}

}  // namespace bench
