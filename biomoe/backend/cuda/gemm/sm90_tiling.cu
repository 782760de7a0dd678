// Which tiling each product takes.
#include "biomoe/backend/cuda/gemm/grouped_gemm_sm90.h"

namespace biomoe::cuda::sm90 {
namespace {

// Up to about 24 waves of tiles on a Hopper GPU, the gain from cutting the last one (half a wave at best)
// shows.
constexpr int64_t kMostTilesToSplit = 24 * 132;

Tiling split_where_few(const ExpertRows& rows, int64_t columns, const void* workspace) {
  const int64_t tiles = rows.capacity / kSegmentRows * ((columns + kTileColumns - 1) / kTileColumns);
  return {.cluster = 2, .split = workspace != nullptr && tiles <= kMostTilesToSplit};
}

}  // namespace

Tiling choose_tiling(const ForwardProblem& problem) {
  return split_where_few(problem.rows, problem.out, problem.workspace);
}
Tiling choose_tiling(const GateUpProblem&) {
  return {.cluster = 2};
}
Tiling choose_tiling(const DgradProblem& problem) {
  return split_where_few(problem.rows, problem.in, problem.workspace);
}
Tiling choose_tiling(const DownDgradProblem&) {
  return {.cluster = 2};
}
Tiling choose_tiling(const WgradProblem&) {
  return {.cluster = 2};
}

}  // namespace biomoe::cuda::sm90
