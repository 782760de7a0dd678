#include "biomoe/ops/gemm.h"

#include <cublasLt.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "biomoe/backend/cuda/gemm_of_codes.h"
#include "biomoe/backend/cuda/gemm_plans.h"
#include "biomoe/backend/cuda/mx_products.h"
#include "biomoe/backend/cuda/state.h"
#include "biomoe/core/error.h"

namespace biomoe::cuda {
namespace {

void check_cublas(cublasStatus_t status, const char* call) {
  if (status != CUBLAS_STATUS_SUCCESS) throw failure("gemm: {}: {}", call, cublasLtGetStatusString(status));
}

cudaDataType_t data_type(DType dtype) {
  return dtype == DType::kBF16 ? CUDA_R_16BF : CUDA_R_32F;
}

// cuBLASLt looks at no more than 256 bytes.
uint32_t alignment_of(const void* address) {
  const auto bits = reinterpret_cast<uintptr_t>(address) | 256u;
  return static_cast<uint32_t>(bits & (~bits + 1));
}

// A view of one row may have any stride.
int64_t stride_of(const TensorView& view) {
  return std::max(view.row_stride, view.shape[1]);
}

GemmKey key_of(const GemmArgs& args) {
  return {.rows = args.c.shape[0],
          .columns = args.c.shape[1],
          .inner = args.a.shape[args.transpose_a ? 0 : 1],
          .strides = {stride_of(args.a), stride_of(args.b), stride_of(args.c)},
          .alignments = {alignment_of(args.a.data), alignment_of(args.b.data), alignment_of(args.c.data)},
          .input = args.a.dtype,
          .output = args.c.dtype,
          .transpose_a = args.transpose_a,
          .transpose_b = args.transpose_b,
          .accumulate = args.accumulate};
}

// cuBLASLt stores by columns: what we store as [rows, columns] it reads as [columns, rows].
GemmDescriptor<cublasLtMatrixLayout_t> layout(DType dtype, int64_t rows, int64_t columns, int64_t stride) {
  cublasLtMatrixLayout_t made = nullptr;
  check_cublas(cublasLtMatrixLayoutCreate(&made, data_type(dtype), static_cast<uint64_t>(columns),
                                          static_cast<uint64_t>(rows), stride),
               "cublasLtMatrixLayoutCreate");
  return GemmDescriptor<cublasLtMatrixLayout_t>(made);
}

GemmDescriptor<cublasLtMatmulDesc_t> product(const GemmKey& key) {
  cublasLtMatmulDesc_t made = nullptr;
  check_cublas(cublasLtMatmulDescCreate(&made, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
  GemmDescriptor<cublasLtMatmulDesc_t> owner(made);
  const auto set = [&](cublasLtMatmulDescAttributes_t attribute, bool transpose) {
    const cublasOperation_t operation = transpose ? CUBLAS_OP_T : CUBLAS_OP_N;
    check_cublas(cublasLtMatmulDescSetAttribute(made, attribute, &operation, sizeof(operation)),
                 "cublasLtMatmulDescSetAttribute");
  };
  // The transpose of c is the product of the transposes of b and a, in this order.
  set(CUBLASLT_MATMUL_DESC_TRANSA, key.transpose_b);
  set(CUBLASLT_MATMUL_DESC_TRANSB, key.transpose_a);
  return owner;
}

GemmDescriptor<cublasLtMatmulPreference_t> preference(const GemmKey& key, uint64_t workspace_bytes) {
  cublasLtMatmulPreference_t made = nullptr;
  check_cublas(cublasLtMatmulPreferenceCreate(&made), "cublasLtMatmulPreferenceCreate");
  GemmDescriptor<cublasLtMatmulPreference_t> owner(made);
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    check_cublas(cublasLtMatmulPreferenceSetAttribute(made, attribute, &value, sizeof(value)),
                 "cublasLtMatmulPreferenceSetAttribute");
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace_bytes);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, key.alignments[1]);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, key.alignments[0]);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, key.alignments[2]);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, key.alignments[2]);
  return owner;
}

void clear(const DeviceState& state, const TensorView& c) {
  const size_t element = dtype_size(c.dtype);
  check(cudaMemset2DAsync(c.data, static_cast<size_t>(stride_of(c)) * element, 0,
                          static_cast<size_t>(c.shape[1]) * element, static_cast<size_t>(c.shape[0]),
                          state.stream),
        "gemm: cudaMemset2DAsync");
}

}  // namespace

GemmPlan::GemmPlan(cublasLtHandle_t handle, const GemmKey& key, size_t workspace_bytes)
    : product_(product(key)) {
  const auto stored = [&](bool transposed, int64_t rows, int64_t columns, int64_t stride) {
    return transposed ? layout(key.input, columns, rows, stride) : layout(key.input, rows, columns, stride);
  };
  a_ = stored(key.transpose_a, key.rows, key.inner, key.strides[0]);
  b_ = stored(key.transpose_b, key.inner, key.columns, key.strides[1]);
  c_ = layout(key.output, key.rows, key.columns, key.strides[2]);
  choose_algorithm(handle, key, workspace_bytes);
}

void GemmPlan::choose_algorithm(cublasLtHandle_t handle, const GemmKey& key, size_t workspace_bytes) {
  cublasLtMatmulHeuristicResult_t best{};
  int found = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(handle, product_.get(), b_.get(), a_.get(), c_.get(), c_.get(),
                                     preference(key, workspace_bytes).get(), 1, &best, &found);
  if (status != CUBLAS_STATUS_SUCCESS || found == 0) {
    throw failure("gemm: cuBLASLt has no algorithm for {} x {} x {}, {} to {}: {}", key.rows, key.columns,
                  key.inner, dtype_name(key.input), dtype_name(key.output), cublasLtGetStatusString(status));
  }
  algorithm_ = best.algo;
}

void GemmPlan::run(const DeviceState& state, const GemmArgs& args) const {
  const float alpha = 1.0f;
  const float beta = args.accumulate ? 1.0f : 0.0f;
  check_cublas(cublasLtMatmul(state.cublas_lt, product_.get(), &alpha, args.b.data, b_.get(), args.a.data,
                              a_.get(), &beta, args.c.data, c_.get(), args.c.data, c_.get(), &algorithm_,
                              state.workspace, state.workspace_bytes, state.stream),
               "cublasLtMatmul");
}

const GemmPlan& GemmPlans::find_or_make(const DeviceState& state, const GemmKey& key) {
  const auto found = plans_.find(key);
  if (found != plans_.end()) return *found->second;
  // Experts one by one have other rows at every step.
  constexpr size_t kEnough = 4096;
  if (plans_.size() >= kEnough) plans_.clear();
  auto plan = std::make_unique<GemmPlan>(state.cublas_lt, key, state.workspace_bytes);
  return *plans_.emplace(key, std::move(plan)).first->second;
}

void gemm(Context& ctx, const GemmArgs& args) {
  if (args.mx_codes) return mx_gemm(ctx, args);
  if (args.codes || args.column_codes) return gemm_of_codes(ctx, args);
  DeviceState& state = *ctx.state;
  const GemmKey key = key_of(args);
  if (key.rows == 0 || key.columns == 0) return;
  if (key.inner == 0) {
    if (!args.accumulate) clear(state, args.c);
    return;
  }
  BM_CHECK(args.a.dtype == args.c.dtype || args.c.dtype == DType::kF32, "gemm: {} into {}",
           dtype_name(args.a.dtype), dtype_name(args.c.dtype));
  if (!state.gemm_plans) state.gemm_plans = std::make_shared<GemmPlans>();
  state.gemm_plans->find_or_make(state, key).run(state, args);
}

}  // namespace biomoe::cuda
