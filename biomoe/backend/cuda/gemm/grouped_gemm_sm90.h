// Grouped GEMM for Hopper (sm_90a): BF16 or E4M3 operands, FP32 accumulation, one launch over all experts,
// with the routing read on the device. A plan holds what a launch passes to the kernel (tensor maps, sizes,
// pointers); it is built once for a set of buffers, and launching it is capturable in a CUDA graph.
//
// All matrices are row-major and 16-byte aligned, and widths are multiples of 8 (of 32 for the halves of
// gate_up). Rows are in expert order: expert e owns rows [offsets[e], offsets[e+1]), each offset a multiple
// of 128, of which the first rows_valid[e] are real. Padding rows of every input (and their probabilities)
// are zeros; padding rows of every output are written as zeros. Rows from offsets[E] on are neither used nor
// written. Weights are [E, out, in].
//
// gate_up [R, 2F] interleaves its two halves by 32 columns: columns [64 b, 64 b + 32) are the gate of
// features [32 b, 32 b + 32), columns [64 b + 32, 64 b + 64) their up projection. W_gate_up's rows are
// ordered likewise.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace biomoe::cuda::sm90 {

constexpr int kMaxExperts = 256;
constexpr int kSegmentRows = 128;  // offsets are multiples of this

// Without offsets and rows_valid there is one expert, and all rows are its real ones, as many as there are.
struct ExpertRows {
  const int64_t* offsets = nullptr;     // device [E + 1]
  const int32_t* rows_valid = nullptr;  // device [E]
  int experts = 0;
  int64_t capacity = 0;  // rows of every row buffer
};

enum class OperandType { kBf16, kFp8 };

constexpr int kScaleBlock = 128;  // rows and columns of weights, and columns of rows, that share a scale

// Operands as E4M3 codes with FP32 scales, in the place of both BF16 operands of a product of [capacity, K]
// rows by [E, N, K] weights: an operand's values are code x scale. N and K are multiples of kScaleBlock.
// Codes are summed over kScaleBlock of k at a time in the tensor core's precision, and these sums in FP32.
struct Fp8Operands {
  const uint8_t* rows = nullptr;  // [capacity, K]
  // [K / kScaleBlock, row_scales_stride]: of columns [kScaleBlock b, kScaleBlock b + kScaleBlock) of row r at
  // [b, r]. The stride is a multiple of 4 and at least capacity, without offsets rounded up to kScaleBlock.
  const float* row_scales = nullptr;
  int64_t row_scales_stride = 0;
  const uint8_t* weights = nullptr;  // [E, N, K]
  // Of block (n, k) of expert e at e expert_stride + n n_stride + k k_stride.
  const float* weight_scales = nullptr;
  int64_t expert_stride = 0, n_stride = 0, k_stride = 0;

  explicit operator bool() const { return rows != nullptr; }
  OperandType type() const { return rows != nullptr ? OperandType::kFp8 : OperandType::kBf16; }
};

// The operands of a weight gradient as E4M3 codes, transposed so that the rows summed over are contiguous, in
// blocks of kScaleBlock rows of one column: of columns c and rows from kScaleBlock b the scale is at [b, c].
// in and out are multiples of kScaleBlock, capacity of 16. Summed as above.
struct Fp8Columns {
  const uint8_t* dy = nullptr;       // [out, capacity]
  const float* dy_scales = nullptr;  // [capacity / kScaleBlock rounded up, out]
  const uint8_t* x = nullptr;        // [in, capacity]
  const float* x_scales = nullptr;   // [capacity / kScaleBlock rounded up, in]

  explicit operator bool() const { return dy != nullptr; }
  OperandType type() const { return dy != nullptr ? OperandType::kFp8 : OperandType::kBf16; }
};

// y[r] = x[r] w[e]^T. workspace: for Tiling::split, see split_workspace_bytes().
struct ForwardProblem {
  ExpertRows rows;
  int64_t in = 0, out = 0;
  const __nv_bfloat16* x = nullptr;  // [capacity, in]
  const __nv_bfloat16* w = nullptr;  // [E, out, in]
  __nv_bfloat16* y = nullptr;        // [capacity, out]
  void* workspace = nullptr;
  Fp8Operands fp8{};  // N = out, K = in
};

// gate_up[r] = x[r] w[e]^T; act[r] = silu(gate) up prob[r], computed from the rounded gate_up.
struct GateUpProblem {
  ExpertRows rows;
  int64_t in = 0, features = 0;
  const __nv_bfloat16* x = nullptr;  // [capacity, in]
  const __nv_bfloat16* w = nullptr;  // [E, 2 features, in]
  const float* prob = nullptr;       // [capacity]
  __nv_bfloat16* gate_up = nullptr;  // [capacity, 2 features]
  __nv_bfloat16* act = nullptr;      // [capacity, features]
};

// dx[r] = dy[r] w[e]. workspace as above.
struct DgradProblem {
  ExpertRows rows;
  int64_t in = 0, out = 0;
  const __nv_bfloat16* dy = nullptr;  // [capacity, out]
  const __nv_bfloat16* w = nullptr;   // [E, out, in]
  __nv_bfloat16* dx = nullptr;        // [capacity, in]
  void* workspace = nullptr;
  Fp8Operands fp8{};  // N = in, K = out: the weights are transposed
};

// dact[r] = dy[r] w[e], rounded to BF16 and not stored; from it, gate_up and prob the gradients of gate_up
// and of the probabilities. dprob_partials is workspace of dprob_partials_count() floats; the sums over
// features are taken in a fixed order.
struct DownDgradProblem {
  ExpertRows rows;
  int64_t features = 0, out = 0;
  const __nv_bfloat16* dy = nullptr;       // [capacity, out]
  const __nv_bfloat16* w = nullptr;        // [E, out, features]
  const __nv_bfloat16* gate_up = nullptr;  // [capacity, 2 features]
  const float* prob = nullptr;             // [capacity]
  __nv_bfloat16* dgate_up = nullptr;       // [capacity, 2 features]; may be gate_up
  float* dprob_partials = nullptr;
  float* dprob = nullptr;  // [capacity]
};

enum class GradientType { kBf16, kFp32 };

// dw[e] = dy[rows e]^T x[rows e], or added to dw: in FP32, or in BF16 with the product rounded before the
// sum. An expert without rows gets zeros, or keeps its dw. square_sums (may be null; not with accumulate):
// for every 16 rows and tile of columns of dw the sum of squares of what was stored,
// wgrad_square_sums_count() values that are all written.
struct WgradProblem {
  ExpertRows rows;
  int64_t in = 0, out = 0;
  const __nv_bfloat16* dy = nullptr;  // [capacity, out]
  const __nv_bfloat16* x = nullptr;   // [capacity, in]
  void* dw = nullptr;                 // [E, out, in] of `type`
  GradientType type = GradientType::kBf16;
  bool accumulate = false;
  float* square_sums = nullptr;
  Fp8Columns fp8{};
};

// Columns of an output tile; its rows are kSegmentRows.
constexpr int kTileColumns = 256;

// A cluster of two blocks shares the operand that their tiles have in common. With `split`, which needs a
// workspace, the tiles of a last wave that would leave half of the multiprocessors idle or more are cut along
// the sum, and the parts added in a fixed order: products with few columns and long sums gain.
struct Tiling {
  int cluster = 2;  // 1 or 2
  bool split = false;
  int multiprocessors = 0;  // to fill; 0: all of the device
};

// Workspace for one product at a time on the current device. Its first kSplitTicketBytes are zero before the
// first use; every use leaves them so.
constexpr int64_t kSplitTicketBytes = 4096;
cudaError_t split_workspace_bytes(int64_t* bytes);

// Tilings measured best for each kind of product.
Tiling choose_tiling(const ForwardProblem& problem);
Tiling choose_tiling(const GateUpProblem& problem);
Tiling choose_tiling(const DgradProblem& problem);
Tiling choose_tiling(const DownDgradProblem& problem);
Tiling choose_tiling(const WgradProblem& problem);

int64_t dprob_partials_count(const DownDgradProblem& problem);
int64_t wgrad_square_sums_count(const WgradProblem& problem);

// Parameters of every kernel of the family. Maps are three-dimensional: [1, rows, columns] or [E, out, in].
struct KernelParams {
  CUtensorMap a;    // the operand whose index is the output's row
  CUtensorMap b;    // the operand whose index is the output's column
  CUtensorMap out;  // y, gate_up, dx, dgate_up or dw
  CUtensorMap aux;  // act (written) or gate_up (read)
  const int64_t* offsets;
  const int32_t* rows_valid;
  const float* prob;
  const float* row_scales;     // of codes: of a, as Fp8Operands or Fp8Columns have them
  const float* column_scales;  // of b
  int64_t row_scales_stride, expert_stride, n_stride, k_stride;  // of Fp8Operands
  float* partials;                                               // dprob_partials or square_sums
  void* workspace;                                               // of split tiles, or null
  int64_t capacity;
  int experts;
  int m_extent;  // rows of an expert's output where that is not its segment (out of a weight gradient)
  int n_extent;  // columns of the output; for dgate_up those of dact
  int k_extent;  // length of the sums where that is not the segment
  int n_tiles;
  bool accumulate;
};

class GroupedGemmPlan {
 public:
  // Enqueues the product on `stream`.
  cudaError_t launch(cudaStream_t stream) const;

 private:
  friend struct PlanBuilder;
  KernelParams params_{};
  const void* kernel_ = nullptr;
  int blocks_ = 0;
  int cluster_ = 1;
  int shared_bytes_ = 0;
  float* dprob_ =
      nullptr;  // with it, the partial sums of the probabilities' gradient are added up afterwards
};

// cudaErrorInvalidValue: sizes, alignment or the tiling outside of what stands above; cudaErrorNotSupported:
// the current device is not a Hopper GPU, or the driver has no tensor maps.
cudaError_t make_plan(const ForwardProblem& problem, const Tiling& tiling, GroupedGemmPlan* plan);
cudaError_t make_plan(const GateUpProblem& problem, const Tiling& tiling, GroupedGemmPlan* plan);
cudaError_t make_plan(const DgradProblem& problem, const Tiling& tiling, GroupedGemmPlan* plan);
cudaError_t make_plan(const DownDgradProblem& problem, const Tiling& tiling, GroupedGemmPlan* plan);
cudaError_t make_plan(const WgradProblem& problem, const Tiling& tiling, GroupedGemmPlan* plan);

}  // namespace biomoe::cuda::sm90
