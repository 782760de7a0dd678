// Which tiling each product takes.
#include "biomoe/backend/cuda/gemm/grouped_gemm_sm90.h"

namespace biomoe::cuda::sm90 {

int tile_columns(const Tiling& tiling) {
  return tiling.schedule == TileSchedule::kCooperative ? 256 : 128;
}

Tiling choose_tiling(const ForwardProblem&) {
  return {TileSchedule::kCooperative, 2};
}
Tiling choose_tiling(const GateUpProblem&) {
  return {TileSchedule::kCooperative, 2};
}
Tiling choose_tiling(const DgradProblem&) {
  return {TileSchedule::kCooperative, 2};
}
Tiling choose_tiling(const DownDgradProblem&) {
  return {TileSchedule::kPingpong, 2};
}
Tiling choose_tiling(const WgradProblem&) {
  return {TileSchedule::kPingpong, 2};
}

}  // namespace biomoe::cuda::sm90
