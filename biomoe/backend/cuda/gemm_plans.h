// The cuBLASLt products seen so far: descriptors and the algorithm chosen for each.
#pragma once

#include <cublasLt.h>

#include <array>
#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <type_traits>

#include "biomoe/core/context.h"
#include "biomoe/core/dtype.h"
#include "biomoe/ops/gemm.h"

namespace biomoe::cuda {

// Everything that the choice of an algorithm may depend on.
struct GemmKey {
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t inner = 0;
  std::array<int64_t, 3> strides{};      // of a, b, c
  std::array<uint32_t, 3> alignments{};  // of their addresses, in bytes
  DType input = DType::kF32;
  DType output = DType::kF32;
  bool transpose_a = false;
  bool transpose_b = false;
  bool accumulate = false;

  auto operator<=>(const GemmKey&) const = default;
};

struct GemmDescriptorDelete {
  void operator()(cublasLtMatmulDesc_t product) const { cublasLtMatmulDescDestroy(product); }
  void operator()(cublasLtMatrixLayout_t layout) const { cublasLtMatrixLayoutDestroy(layout); }
  void operator()(cublasLtMatmulPreference_t preference) const {
    cublasLtMatmulPreferenceDestroy(preference);
  }
};
template <typename Pointer>
using GemmDescriptor = std::unique_ptr<std::remove_pointer_t<Pointer>, GemmDescriptorDelete>;

class GemmPlan {
 public:
  GemmPlan(cublasLtHandle_t handle, const GemmKey& key, size_t workspace_bytes);

  void run(const DeviceState& state, const GemmArgs& args) const;

 private:
  void choose_algorithm(cublasLtHandle_t handle, const GemmKey& key, size_t workspace_bytes);

  GemmDescriptor<cublasLtMatmulDesc_t> product_;
  GemmDescriptor<cublasLtMatrixLayout_t> a_, b_, c_;
  cublasLtMatmulAlgo_t algorithm_{};
};

class GemmPlans {
 public:
  // Valid until the next call.
  const GemmPlan& find_or_make(const DeviceState& state, const GemmKey& key);

 private:
  std::map<GemmKey, std::unique_ptr<GemmPlan>> plans_;
};

}  // namespace biomoe::cuda
