// What the checks and the timings of the grouped GEMM kernels share: device arrays, routed rows, tilings.
#pragma once

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "bench/cuda/grouped_gemm_reference.cuh"
#include "biomoe/backend/cuda/gemm/grouped_gemm_sm90.h"

namespace bench {

namespace sm90 = biomoe::cuda::sm90;
using sm90::GroupedGemmPlan;
using sm90::Tiling;

constexpr Tiling kTilings[] = {{1, false}, {2, false}, {1, true}, {2, true}};
constexpr const char* kTilingNames[] = {"cluster 1", "cluster 2", "cluster 1, split", "cluster 2, split"};
constexpr int kTilingCount = 4;

template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(int64_t count) : count_(count) {
    BENCH_CUDA(cudaMalloc(&data_, static_cast<size_t>(std::max<int64_t>(count, 1)) * sizeof(T)));
  }
  explicit DeviceArray(const std::vector<T>& host) : DeviceArray(static_cast<int64_t>(host.size())) {
    BENCH_CUDA(cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* get() const { return data_; }
  int64_t count() const { return count_; }
  void poison() { BENCH_CUDA(cudaMemset(data_, 0xFF, static_cast<size_t>(count_) * sizeof(T))); }
  void copy_from(const DeviceArray& other) {
    BENCH_CUDA(
        cudaMemcpy(data_, other.data_, static_cast<size_t>(count_) * sizeof(T), cudaMemcpyDeviceToDevice));
  }

 private:
  T* data_ = nullptr;
  int64_t count_;
};

// For split tiles; one product at a time uses it.
struct SplitWorkspace {
  SplitWorkspace() : bytes(size()) {
    bytes.poison();
    BENCH_CUDA(cudaMemset(bytes.get(), 0, sm90::kSplitTicketBytes));
  }
  static int64_t size() {
    int64_t count = 0;
    BENCH_CUDA(sm90::split_workspace_bytes(&count));
    return count;
  }
  DeviceArray<uint8_t> bytes;
};

constexpr int kGrid = 1320;
constexpr int kBlock = 256;

inline std::unique_ptr<DeviceArray<Bf16>> random_weights(int64_t count, float scale, uint64_t seed) {
  auto array = std::make_unique<DeviceArray<Bf16>>(count);
  fill_normal_kernel<<<kGrid, kBlock>>>(array->get(), count, scale, seed);
  return array;
}

// A number of random codes, used as any operand, beside scales that are all the same.
struct RandomCodes {
  RandomCodes(int64_t count, float scale) : codes(count), scales(count / sm90::kScaleBlock) {
    fill_normal_kernel<<<kGrid, kBlock>>>(codes.get(), count, 64.0f, 1);
    fill_kernel<<<kGrid, kBlock>>>(scales.get(), scales.count(), scale / 64.0f);
  }
  DeviceArray<__nv_fp8_e4m3> codes;
  DeviceArray<float> scales;
};

// Operands of a product of [capacity, k] rows by [E, n, k] weights.
inline sm90::Fp8Operands fp8_operands(const RandomCodes& rows, int64_t capacity, const RandomCodes& weights,
                                      int64_t n, int64_t k) {
  const int64_t blocks = k / sm90::kScaleBlock;
  return {.rows = reinterpret_cast<const uint8_t*>(rows.codes.get()),
          .row_scales = rows.scales.get(),
          .row_scales_stride = capacity,
          .weights = reinterpret_cast<const uint8_t*>(weights.codes.get()),
          .weight_scales = weights.scales.get(),
          .expert_stride = n / sm90::kScaleBlock * blocks,
          .n_stride = blocks,
          .k_stride = 1};
}

// Operands of a weight gradient.
inline sm90::Fp8Columns fp8_columns(const RandomCodes& dy, const RandomCodes& x) {
  return {.dy = reinterpret_cast<const uint8_t*>(dy.codes.get()),
          .dy_scales = dy.scales.get(),
          .x = reinterpret_cast<const uint8_t*>(x.codes.get()),
          .x_scales = x.scales.get()};
}

// Routed rows on the device.
struct Rows {
  explicit Rows(const std::vector<int>& counts, int64_t spare) {
    std::vector<int64_t> starts{0};
    std::vector<int32_t> experts_of_rows;
    for (size_t e = 0; e < counts.size(); ++e) {
      const int64_t padded = (counts[e] + 127) / 128 * 128;
      starts.push_back(starts.back() + padded);
      experts_of_rows.insert(experts_of_rows.end(), static_cast<size_t>(padded), static_cast<int32_t>(e));
      valid += counts[e];
    }
    capacity = starts.back() + spare;
    experts_of_rows.resize(static_cast<size_t>(capacity), -1);
    experts = static_cast<int>(counts.size());
    offsets = std::make_unique<DeviceArray<int64_t>>(starts);
    rows_valid = std::make_unique<DeviceArray<int32_t>>(std::vector<int32_t>(counts.begin(), counts.end()));
    row_expert = std::make_unique<DeviceArray<int32_t>>(experts_of_rows);
  }
  sm90::ExpertRows expert_rows() const { return {offsets->get(), rows_valid->get(), experts, capacity}; }
  Routing routing() const { return {offsets->get(), row_expert->get(), capacity, experts}; }

  std::unique_ptr<DeviceArray<Bf16>> activations(int64_t columns, uint64_t seed) const {
    auto array = std::make_unique<DeviceArray<Bf16>>(capacity * columns);
    fill_rows_kernel<<<kGrid, kBlock>>>(array->get(), columns, routing(), rows_valid->get(), 1.0f, seed);
    return array;
  }
  std::unique_ptr<DeviceArray<float>> probs(uint64_t seed) const {
    auto array = std::make_unique<DeviceArray<float>>(capacity);
    fill_probs_kernel<<<static_cast<unsigned>((capacity + kBlock - 1) / kBlock), kBlock>>>(
        array->get(), routing(), rows_valid->get(), seed);
    return array;
  }

  int experts = 0;
  int64_t valid = 0, capacity = 0;
  std::unique_ptr<DeviceArray<int64_t>> offsets;
  std::unique_ptr<DeviceArray<int32_t>> rows_valid, row_expert;
};

// Tokens choose k distinct experts, uniformly.
inline std::vector<int> random_counts(int tokens, int k, int experts, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<int> counts(static_cast<size_t>(experts), 0), order(static_cast<size_t>(experts));
  for (int e = 0; e < experts; ++e) order[static_cast<size_t>(e)] = e;
  for (int t = 0; t < tokens; ++t) {
    for (int i = 0; i < k; ++i) {
      const auto pick = static_cast<size_t>(i) + random() % static_cast<size_t>(experts - i);
      std::swap(order[static_cast<size_t>(i)], order[pick]);
      ++counts[static_cast<size_t>(order[static_cast<size_t>(i)])];
    }
  }
  return counts;
}

template <typename Problem>
GroupedGemmPlan plan_for(const Problem& problem, const Tiling& tiling) {
  GroupedGemmPlan plan;
  BENCH_CUDA(make_plan(problem, tiling, &plan));
  return plan;
}

}  // namespace bench
