// Which tiling each product takes.
#include "biomoe/backend/cuda/gemm/grouped_gemm_sm90.h"

namespace biomoe::cuda::sm90 {

Tiling choose_tiling(const ForwardProblem&) {
  return {2};
}
Tiling choose_tiling(const GateUpProblem&) {
  return {2};
}
Tiling choose_tiling(const DgradProblem&) {
  return {2};
}
Tiling choose_tiling(const DownDgradProblem&) {
  return {2};
}
Tiling choose_tiling(const WgradProblem&) {
  return {2};
}

}  // namespace biomoe::cuda::sm90
