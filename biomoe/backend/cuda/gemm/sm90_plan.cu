// From problems to plans: checks, tensor maps, launch.
#include <algorithm>
#include <atomic>
#include <cstdlib>

#include "biomoe/backend/cuda/gemm/sm90_kernels.h"

namespace biomoe::cuda::sm90 {
namespace {

constexpr int kBoxSide = 64;
constexpr int64_t kMaxExtent = int64_t{1} << 31;  // tensor map coordinates are 32-bit

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's function, by way of the runtime, so that no program links against the driver library. Looked
// up once.
cudaError_t find_encoder(EncodeTiled* encode) {
  static std::atomic<EncodeTiled> known{nullptr};
  *encode = known;
  if (*encode) return cudaSuccess;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  if (status != cudaSuccess) return status;
  if (found != cudaDriverEntryPointSuccess || function == nullptr) return cudaErrorNotSupported;
  known = *encode = reinterpret_cast<EncodeTiled>(function);
  return cudaSuccess;
}

struct MatrixExtent {
  int64_t outer, rows, columns;
};

enum class Element { kCode = 1, kBf16 = 2, kFp32 = 4 };  // bytes

CUtensorMapDataType map_type(Element element) {
  return element == Element::kCode   ? CU_TENSOR_MAP_DATA_TYPE_UINT8
         : element == Element::kBf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                     : CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
}

cudaError_t count_multiprocessors(int* count) {
  int device = 0;
  const cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  return cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
}

bool is_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

}  // namespace

// Fills one plan; the first failure sticks.
struct PlanBuilder {
  GroupedGemmPlan* plan;
  Tiling tiling;
  cudaError_t status = cudaSuccess;

  KernelParams& params() { return plan->params_; }

  void require(bool condition) {
    if (!condition && status == cudaSuccess) status = cudaErrorInvalidValue;
  }

  void map(CUtensorMap* map, const void* data, const MatrixExtent& extent, Element type = Element::kBf16) {
    const auto element = static_cast<int64_t>(type);
    require(data != nullptr && is_aligned(data) && extent.columns * element % 16 == 0);
    require(extent.outer > 0 && extent.rows > 0 && extent.columns > 0 && extent.rows < kMaxExtent &&
            extent.columns < kMaxExtent);
    EncodeTiled encode = nullptr;
    if (status == cudaSuccess) status = find_encoder(&encode);
    if (status != cudaSuccess) return;
    const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(extent.columns),
                                 static_cast<cuuint64_t>(extent.rows), static_cast<cuuint64_t>(extent.outer)};
    const cuuint64_t strides[2] = {static_cast<cuuint64_t>(extent.columns * element),
                                   static_cast<cuuint64_t>(extent.rows * extent.columns * element)};
    const cuuint32_t box[3] = {static_cast<cuuint32_t>(128 / element), kBoxSide, 1};
    const cuuint32_t steps[3] = {1, 1, 1};
    const CUresult result = encode(map, map_type(type), 3, const_cast<void*>(data), sizes, strides, box,
                                   steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) status = cudaErrorInvalidValue;
  }

  void rows(const ExpertRows& rows) {
    require(rows.offsets != nullptr ? rows.rows_valid != nullptr
                                    : rows.rows_valid == nullptr && rows.experts == 1);
    require(rows.experts > 0 && rows.experts <= kMaxExperts);
    require(rows.capacity > 0 && rows.capacity < kMaxExtent);
    params().offsets = rows.offsets;
    params().rows_valid = rows.rows_valid;
    params().experts = rows.experts;
    params().capacity = rows.capacity;
  }

  // Both operands of a product whose sums run over columns of rows.
  void operands(const ExpertRows& rows, const void* x, const MatrixExtent& weights, const void* w,
                const Fp8Operands& fp8 = {}) {
    const int64_t n = params().n_extent, k = params().k_extent;
    if (!fp8) {
      map(&params().a, x, {1, rows.capacity, k});
      map(&params().b, w, weights);
      return;
    }
    require(n % kScaleBlock == 0 && k % kScaleBlock == 0);
    require(fp8.row_scales != nullptr && is_aligned(fp8.row_scales) && fp8.weight_scales != nullptr);
    require(fp8.row_scales_stride % 4 == 0 && fp8.row_scales_stride >= rows.capacity);
    map(&params().a, fp8.rows, {1, rows.capacity, k}, Element::kCode);
    map(&params().b, fp8.weights, {rows.experts, n, k}, Element::kCode);
    params().row_scales = fp8.row_scales;
    params().row_scales_stride = fp8.row_scales_stride;
    params().column_scales = fp8.weight_scales;
    params().expert_stride = fp8.expert_stride;
    params().n_stride = fp8.n_stride;
    params().k_stride = fp8.k_stride;
  }

  // Those of a weight gradient.
  void operands(const WgradProblem& problem) {
    const Fp8Columns& fp8 = problem.fp8;
    const int64_t rows = problem.rows.capacity;
    if (!fp8) {
      map(&params().a, problem.dy, {1, rows, problem.out});
      map(&params().b, problem.x, {1, rows, problem.in});
      return;
    }
    require(problem.out % kScaleBlock == 0 && problem.in % kScaleBlock == 0);
    require(fp8.dy_scales != nullptr && is_aligned(fp8.dy_scales) && fp8.x_scales != nullptr &&
            is_aligned(fp8.x_scales));
    map(&params().a, fp8.dy, {1, problem.out, rows}, Element::kCode);
    map(&params().b, fp8.x, {1, problem.in, rows}, Element::kCode);
    params().row_scales = fp8.dy_scales;
    params().column_scales = fp8.x_scales;
  }

  void sizes(int64_t m, int64_t n, int64_t k) {
    require(m < kMaxExtent && n < kMaxExtent && k < kMaxExtent && n % 8 == 0 && k % 8 == 0);
    require(tiling.cluster == 1 || tiling.cluster == 2);
    params().m_extent = static_cast<int>(m);
    params().n_extent = static_cast<int>(n);
    params().k_extent = static_cast<int>(k);
    params().n_tiles = static_cast<int>((n + kTileColumns - 1) / kTileColumns);
  }

  void kernel(const KernelChoice& choice) {
    if (status != cudaSuccess) return;
    int device = 0;
    int multiprocessors = 0;
    int major = 0;
    status = count_multiprocessors(&multiprocessors);
    if (status == cudaSuccess) status = cudaGetDevice(&device);
    if (status == cudaSuccess) {
      status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    }
    if (status == cudaSuccess && major != 9) status = cudaErrorNotSupported;
    if (status != cudaSuccess) return;
    status = cudaFuncSetAttribute(choice.function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  choice.shared_bytes);
    plan->kernel_ = choice.function;
    plan->shared_bytes_ = choice.shared_bytes;
    plan->cluster_ = tiling.cluster;
    if (tiling.multiprocessors > 0) multiprocessors = std::min(multiprocessors, tiling.multiprocessors);
    plan->blocks_ = multiprocessors / tiling.cluster * tiling.cluster;
  }

  void split_into(void* workspace) {
    if (!tiling.split) return;
    require(workspace != nullptr && is_aligned(workspace));
    params().workspace = workspace;
  }

  void sum_dprob_into(float* dprob) { plan->dprob_ = dprob; }
};

namespace {

PlanBuilder start(GroupedGemmPlan* plan, const Tiling& tiling) {
  *plan = GroupedGemmPlan{};
  return PlanBuilder{plan, tiling};
}

}  // namespace

cudaError_t GroupedGemmPlan::launch(cudaStream_t stream) const {
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = static_cast<unsigned>(cluster_);
  cluster.val.clusterDim.y = 1;
  cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks_));
  config.blockDim = dim3(384);
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes_);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  void* arguments[] = {const_cast<KernelParams*>(&params_)};
  const cudaError_t status = cudaLaunchKernelExC(&config, kernel_, arguments);
  if (status != cudaSuccess || dprob_ == nullptr) return status;
  return launch_sum_dprob(params_, dprob_, stream);
}

// A last wave has at most as many parts of tiles as there are blocks, each a tile of FP32.
cudaError_t split_workspace_bytes(int64_t* bytes) {
  int multiprocessors = 0;
  const cudaError_t status = count_multiprocessors(&multiprocessors);
  if (status != cudaSuccess) return status;
  *bytes = kSplitTicketBytes + int64_t{multiprocessors} * kSegmentRows * kTileColumns * 4;
  return cudaSuccess;
}

int64_t dprob_partials_count(const DownDgradProblem& problem) {
  return problem.rows.capacity * ((problem.features + kTileColumns - 1) / kTileColumns);
}

int64_t wgrad_square_sums_count(const WgradProblem& problem) {
  const int64_t row_blocks = (problem.out + 127) / 128 * 8;
  return problem.rows.experts * row_blocks * ((problem.in + kTileColumns - 1) / kTileColumns);
}

cudaError_t make_plan(const ForwardProblem& problem, const Tiling& tiling, GroupedGemmPlan* plan) {
  PlanBuilder builder = start(plan, tiling);
  builder.rows(problem.rows);
  builder.sizes(0, problem.out, problem.in);
  KernelParams& params = builder.params();
  builder.operands(problem.rows, problem.x, {problem.rows.experts, problem.out, problem.in}, problem.w,
                   problem.fp8);
  builder.map(&params.out, problem.y, {1, problem.rows.capacity, problem.out});
  builder.split_into(problem.workspace);
  builder.kernel(forward_kernel(tiling, problem.fp8.type()));
  return builder.status;
}

cudaError_t make_plan(const GateUpProblem& problem, const Tiling& tiling, GroupedGemmPlan* plan) {
  PlanBuilder builder = start(plan, tiling);
  builder.rows(problem.rows);
  builder.sizes(0, 2 * problem.features, problem.in);
  builder.require(problem.features % 32 == 0 && problem.prob != nullptr);
  KernelParams& params = builder.params();
  builder.operands(problem.rows, problem.x, {problem.rows.experts, 2 * problem.features, problem.in},
                   problem.w);
  builder.map(&params.out, problem.gate_up, {1, problem.rows.capacity, 2 * problem.features});
  builder.map(&params.aux, problem.act, {1, problem.rows.capacity, problem.features});
  params.prob = problem.prob;
  builder.kernel(gate_up_kernel(tiling));
  return builder.status;
}

cudaError_t make_plan(const DgradProblem& problem, const Tiling& tiling, GroupedGemmPlan* plan) {
  PlanBuilder builder = start(plan, tiling);
  builder.rows(problem.rows);
  builder.sizes(0, problem.in, problem.out);
  KernelParams& params = builder.params();
  builder.operands(problem.rows, problem.dy, {problem.rows.experts, problem.out, problem.in}, problem.w,
                   problem.fp8);
  builder.map(&params.out, problem.dx, {1, problem.rows.capacity, problem.in});
  builder.split_into(problem.workspace);
  // Of transposed weights the product is that of forward.
  builder.kernel(problem.fp8 ? forward_kernel(tiling, problem.fp8.type()) : dgrad_kernel(tiling));
  return builder.status;
}

cudaError_t make_plan(const DownDgradProblem& problem, const Tiling& tiling, GroupedGemmPlan* plan) {
  PlanBuilder builder = start(plan, tiling);
  builder.rows(problem.rows);
  builder.sizes(0, problem.features, problem.out);
  builder.require(problem.features % 32 == 0 && problem.prob != nullptr &&
                  problem.dprob_partials != nullptr && problem.dprob != nullptr);
  KernelParams& params = builder.params();
  builder.operands(problem.rows, problem.dy, {problem.rows.experts, problem.out, problem.features},
                   problem.w);
  builder.map(&params.aux, problem.gate_up, {1, problem.rows.capacity, 2 * problem.features});
  builder.map(&params.out, problem.dgate_up, {1, problem.rows.capacity, 2 * problem.features});
  params.prob = problem.prob;
  params.partials = problem.dprob_partials;
  builder.kernel(down_dgrad_kernel(tiling));
  builder.sum_dprob_into(problem.dprob);
  return builder.status;
}

cudaError_t make_plan(const WgradProblem& problem, const Tiling& tiling, GroupedGemmPlan* plan) {
  PlanBuilder builder = start(plan, tiling);
  builder.rows(problem.rows);
  builder.sizes(problem.out, problem.in, 0);
  builder.require(problem.square_sums == nullptr ||
                  (!problem.accumulate && problem.type == GradientType::kBf16));
  KernelParams& params = builder.params();
  builder.operands(problem);
  builder.map(&params.out, problem.dw, {problem.rows.experts, problem.out, problem.in},
              problem.type == GradientType::kFp32 ? Element::kFp32 : Element::kBf16);
  params.partials = problem.square_sums;
  params.accumulate = problem.accumulate;
  builder.kernel(wgrad_kernel(tiling, problem.type, problem.fp8.type()));
  return builder.status;
}

}  // namespace biomoe::cuda::sm90
