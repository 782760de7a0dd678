#include "biomoe/ops/grouped_gemm.h"

#include <algorithm>

#include "biomoe/backend/cpu/parallel.h"
#include "biomoe/backend/cpu/sgemm.h"
#include "biomoe/core/error.h"
#include "biomoe/ops/scaled_swiglu.h"

namespace biomoe::cpu {
namespace {

// The product of one expert.
struct ExpertProduct {
  Product c;
  Matrix a;
  Matrix b;
};

void check_offsets(const GroupedGemmArgs& args) {
  const int64_t* offsets = args.offsets_E1.i64();
  const int64_t experts = args.w_EOI.shape[0];
  BM_CHECK(offsets[0] == 0 && offsets[experts] <= args.x_RI.shape[0],
           "grouped_gemm: offsets go from {} to {}, expected 0 to at most {}", offsets[0], offsets[experts],
           args.x_RI.shape[0]);
  for (int64_t e = 0; e < experts; ++e) {
    BM_CHECK(offsets[e] <= offsets[e + 1], "grouped_gemm: offsets[{}] is {}, above offsets[{}] = {}", e,
             offsets[e], e + 1, offsets[e + 1]);
  }
}

// In how many parts at least expert e is shared out: none is to hold more than 1 / kEnoughTiles of the rows
// that are left from e on, so that the last parts are small and the threads end together.
int64_t enough_parts(const TensorView& offsets_E1, int64_t e) {
  const int64_t* offsets = offsets_E1.i64();
  const int64_t left = offsets[offsets_E1.shape[0] - 1] - offsets[e];
  return ceil_div(kEnoughTiles * (offsets[e + 1] - offsets[e]), std::max<int64_t>(1, left));
}

// One list of tiles over all experts, each of bounded work, so that few large and many small experts keep the
// threads equally busy. product_of(e) tells the product of expert e.
template <typename ProductOf>
void run_experts(const Context& ctx, const GroupedGemmArgs& args, const ProductOf& product_of) {
  check_offsets(args);
  const int64_t experts = args.w_EOI.shape[0];
  const auto tiling_of = [&](int64_t e) {
    const ExpertProduct product = product_of(e);
    const bool nothing = product.c.accumulate && product.c.inner == 0;
    return nothing ? Tiling{} : tile_product(product.c, product.a, enough_parts(args.offsets_E1, e));
  };
  int64_t tiles = 0;
  for (int64_t e = 0; e < experts; ++e) tiles += tiling_of(e).count();
  parallel_items(ctx, tiles, [&](int64_t item, int) {
    int64_t e = 0;
    int64_t tile = item;
    Tiling tiling = tiling_of(e);
    for (; tile >= tiling.count(); tiling = tiling_of(++e)) tile -= tiling.count();
    const ExpertProduct product = product_of(e);
    sgemm_tile(product.c, product.a, product.b, tiling, tile);
  });
}

// Views of expert e.
struct Expert {
  explicit Expert(const GroupedGemmArgs& args, int64_t e)
      : rows(args.offsets_E1.i64()[e + 1] - args.offsets_E1.i64()[e]),
        in(args.w_EOI.shape[2]),
        out(args.w_EOI.shape[1]),
        x(args.x_RI.f32() + args.offsets_E1.i64()[e] * args.x_RI.row_stride),
        w(args.w_EOI.f32() + e * args.w_EOI.row_stride),
        y(args.y_RO.f32() + args.offsets_E1.i64()[e] * args.y_RO.row_stride) {}
  int64_t rows, in, out;
  float *x, *w, *y;
};

}  // namespace

void grouped_gemm_forward(Context& ctx, const GroupedGemmArgs& args) {
  run_experts(ctx, args, [&](int64_t index) {
    const Expert e(args, index);
    return ExpertProduct{
        {.data = e.y, .stride = args.y_RO.row_stride, .rows = e.rows, .columns = e.out, .inner = e.in},
        {e.x, args.x_RI.row_stride, false},
        {e.w, e.in, true}};
  });
}

void grouped_gemm_dgrad(Context& ctx, const GroupedGemmArgs& args) {
  run_experts(ctx, args, [&](int64_t index) {
    const Expert e(args, index);
    return ExpertProduct{
        {.data = e.x, .stride = args.x_RI.row_stride, .rows = e.rows, .columns = e.in, .inner = e.out},
        {e.y, args.y_RO.row_stride, false},
        {e.w, e.in, false}};
  });
}

void grouped_gemm_wgrad(Context& ctx, const GroupedGemmArgs& args) {
  run_experts(ctx, args, [&](int64_t index) {
    const Expert e(args, index);
    return ExpertProduct{{.data = e.w,
                          .stride = e.in,
                          .rows = e.out,
                          .columns = e.in,
                          .inner = e.rows,
                          .accumulate = args.accumulate},
                         {e.y, args.y_RO.row_stride, true},
                         {e.x, args.x_RI.row_stride, false}};
  });
}

// The activation is its own pass here: the product's tiles are not kept in cache long enough to gain from
// one.
void grouped_gate_up(Context& ctx, const GroupedGateUpArgs& args) {
  cpu::grouped_gemm_forward(
      ctx,
      {.x_RI = args.x_RD, .w_EOI = args.w_E2FD, .y_RO = args.gate_up_R2F, .offsets_E1 = args.offsets_E1});
  cpu::scaled_swiglu_forward(ctx, {.gate_up_R2F = args.gate_up_R2F,
                                   .probs_R = args.probs_R,
                                   .act_RF = args.act_RF,
                                   .offsets_E1 = args.offsets_E1,
                                   .interleave = args.interleave});
}

void grouped_down_backward(Context& ctx, const GroupedDownBackwardArgs& args) {
  cpu::grouped_gemm_dgrad(
      ctx, {.x_RI = args.dact_RF, .w_EOI = args.w_EDF, .y_RO = args.dy_RD, .offsets_E1 = args.offsets_E1});
  cpu::scaled_swiglu_backward(ctx, {.dact_RF = args.dact_RF,
                                    .gate_up_R2F = args.gate_up_R2F,
                                    .probs_R = args.probs_R,
                                    .dgate_up_R2F = args.dgate_up_R2F,
                                    .dprobs_R = args.dprobs_R,
                                    .offsets_E1 = args.offsets_E1,
                                    .interleave = args.interleave});
}

}  // namespace biomoe::cpu
