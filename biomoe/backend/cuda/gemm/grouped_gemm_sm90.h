// Grouped GEMM for Hopper (sm_90a): BF16 operands, FP32 accumulation, one launch over all experts, with the
// routing read on the device. A plan holds what a launch passes to the kernel (tensor maps, sizes, pointers);
// it is built once for a set of buffers, and launching it is capturable in a CUDA graph.
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

struct ExpertRows {
  const int64_t* offsets = nullptr;     // device [E + 1]
  const int32_t* rows_valid = nullptr;  // device [E]
  int experts = 0;
  int64_t capacity = 0;  // rows of every row buffer
};

// y[r] = x[r] w[e]^T. workspace: for Tiling::split, see split_workspace_bytes().
struct ForwardProblem {
  ExpertRows rows;
  int64_t in = 0, out = 0;
  const __nv_bfloat16* x = nullptr;  // [capacity, in]
  const __nv_bfloat16* w = nullptr;  // [E, out, in]
  __nv_bfloat16* y = nullptr;        // [capacity, out]
  void* workspace = nullptr;
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
};

// Columns of an output tile; its rows are kSegmentRows.
constexpr int kTileColumns = 256;

// A cluster of two blocks shares the operand that their tiles have in common. With `split`, which needs a
// workspace, the tiles of a last wave that would leave half of the multiprocessors idle or more are cut along
// the sum, and the parts added in a fixed order: products with few columns and long sums gain.
struct Tiling {
  int cluster = 2;  // 1 or 2
  bool split = false;
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
  float* partials;  // dprob_partials or square_sums
  void* workspace;  // of split tiles, or null
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
