#include "biomoe/ops/grouped_gemm.h"

#include <algorithm>

#include "biomoe/backend/cpu/mx_products.h"
#include "biomoe/backend/cpu/parallel.h"
#include "biomoe/backend/cpu/scaled_swiglu_rows.h"
#include "biomoe/backend/cpu/sgemm.h"
#include "biomoe/core/error.h"

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

// Computes the tiles of all experts, and calls then(e, rows of the expert) after each: one list, so that few
// large and many small experts keep the threads equally busy. product_of(e) tells the product of expert e,
// tiling_of(e) how it is cut.
template <typename ProductOf, typename TilingOf, typename Then>
void run_tiles(const Context& ctx, const GroupedGemmArgs& args, const ProductOf& product_of,
               const TilingOf& tiling_of, const Then& then) {
  const int64_t experts = args.w_EOI.shape[0];
  int64_t tiles = 0;
  for (int64_t e = 0; e < experts; ++e) tiles += tiling_of(e).count();
  struct Place {
    int64_t e, tile;  // tile of expert e
  };
  const auto further = [&](Place place, int64_t items) {
    place.tile += items;
    for (int64_t count; place.tile >= (count = tiling_of(place.e).count()); ++place.e) place.tile -= count;
    return place;
  };
  const auto tile_at = [&](const Place& place) {
    const ExpertProduct product = product_of(place.e);
    return tile_of(product.c, product.a, product.b, tiling_of(place.e), place.tile);
  };
  parallel_items(ctx, tiles, [&](int64_t item, int) {
    const Place place = further({0, 0}, item);
    const Tile tile = tile_at(place);
    NextProduct next;
    if (item + ctx.num_threads < tiles) {
      const Tile of_next = tile_at(further(place, ctx.num_threads));
      next = {of_next.c, of_next.b};
    }
    sgemm(tile.c, tile.a, tile.b, next);
    then(place.e, tile.rows);
  });
}

template <typename ProductOf>
void run_experts(const Context& ctx, const GroupedGemmArgs& args, const ProductOf& product_of) {
  check_offsets(args);
  const auto tiling_of = [&](int64_t e) {
    const ExpertProduct product = product_of(e);
    const bool nothing = product.c.accumulate && product.c.inner == 0;
    return nothing ? Tiling{} : tile_product(product.c, product.a, enough_parts(args.offsets_E1, e));
  };
  run_tiles(ctx, args, product_of, tiling_of, [](int64_t, Range) {});
}

// As run_experts, in tiles of whole rows, each followed by then(rows) while its rows are in the level 3
// cache.
template <typename ProductOf, typename Then>
void run_experts_by_rows(const Context& ctx, const GroupedGemmArgs& args, const ProductOf& product_of,
                         const Then& then) {
  check_offsets(args);
  // Weights are copied once for each tile: with fewer rows copying weighs, with more they leave the cache.
  constexpr int64_t kMinRows = 96, kMaxRows = 384;
  const int64_t* offsets = args.offsets_E1.i64();
  const auto tiling_of = [&](int64_t e) {
    const int64_t rows = offsets[e + 1] - offsets[e];
    const int64_t enough = std::min(enough_parts(args.offsets_E1, e), ceil_div(rows, kMinRows));
    return Tiling{std::max(enough, ceil_div(rows, kMaxRows)), 1};
  };
  run_tiles(ctx, args, product_of, tiling_of, [&](int64_t e, Range rows) {
    then(Range{offsets[e] + rows.begin, offsets[e] + rows.end});
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

auto forward_products(const GroupedGemmArgs& args) {
  return [&args](int64_t index) {
    const Expert e(args, index);
    return ExpertProduct{
        {.data = e.y, .stride = args.y_RO.row_stride, .rows = e.rows, .columns = e.out, .inner = e.in},
        {e.x, args.x_RI.row_stride, false},
        {e.w, e.in, true}};
  };
}

auto dgrad_products(const GroupedGemmArgs& args) {
  return [&args](int64_t index) {
    const Expert e(args, index);
    return ExpertProduct{
        {.data = e.x, .stride = args.x_RI.row_stride, .rows = e.rows, .columns = e.in, .inner = e.out},
        {e.y, args.y_RO.row_stride, false},
        {e.w, e.in, false}};
  };
}

// The product of what MX codes stand for.
void run_decoded(Context& ctx, const GroupedGemmArgs& args, MxProduct product,
                 void (*run)(Context&, const GroupedGemmArgs&)) {
  DecodedMx decoded = decode_mx(args.mx_codes, product, args.x_RI.shape[0], args.w_EOI.shape);
  GroupedGemmArgs plain = args;
  plain.mx_codes = {};
  TensorView& a = product == MxProduct::kForward ? plain.x_RI : plain.y_RO;
  TensorView& b = product == MxProduct::kWgrad ? plain.x_RI : plain.w_EOI;
  a = TensorView(decoded.a.data(), DType::kF32, a.shape);
  b = TensorView(decoded.b.data(), DType::kF32, b.shape);
  run(ctx, plain);
}

}  // namespace

void grouped_gemm_forward(Context& ctx, const GroupedGemmArgs& args) {
  if (args.mx_codes) return run_decoded(ctx, args, MxProduct::kForward, grouped_gemm_forward);
  run_experts(ctx, args, forward_products(args));
}

void grouped_gemm_dgrad(Context& ctx, const GroupedGemmArgs& args) {
  if (args.mx_codes) return run_decoded(ctx, args, MxProduct::kDgrad, grouped_gemm_dgrad);
  run_experts(ctx, args, dgrad_products(args));
}

void grouped_gemm_wgrad(Context& ctx, const GroupedGemmArgs& args) {
  if (args.mx_codes) return run_decoded(ctx, args, MxProduct::kWgrad, grouped_gemm_wgrad);
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

void grouped_gate_up(Context& ctx, const GroupedGateUpArgs& args) {
  const GroupedGemmArgs product{
      .x_RI = args.x_RD, .w_EOI = args.w_E2FD, .y_RO = args.gate_up_R2F, .offsets_E1 = args.offsets_E1};
  const ScaledSwigluForwardArgs activation{.gate_up_R2F = args.gate_up_R2F,
                                           .probs_R = args.probs_R,
                                           .act_RF = args.act_RF,
                                           .offsets_E1 = args.offsets_E1,
                                           .interleave = args.interleave};
  run_experts_by_rows(ctx, product, forward_products(product),
                      [&](Range rows) { scaled_swiglu_forward_rows(activation, rows); });
}

void grouped_down_backward(Context& ctx, const GroupedDownBackwardArgs& args) {
  const GroupedGemmArgs product{
      .x_RI = args.dact_RF, .w_EOI = args.w_EDF, .y_RO = args.dy_RD, .offsets_E1 = args.offsets_E1};
  const ScaledSwigluBackwardArgs activation{.dact_RF = args.dact_RF,
                                            .gate_up_R2F = args.gate_up_R2F,
                                            .probs_R = args.probs_R,
                                            .dgate_up_R2F = args.dgate_up_R2F,
                                            .dprobs_R = args.dprobs_R,
                                            .offsets_E1 = args.offsets_E1,
                                            .interleave = args.interleave};
  run_experts_by_rows(ctx, product, dgrad_products(product),
                      [&](Range rows) { scaled_swiglu_backward_rows(activation, rows); });
}

}  // namespace biomoe::cpu
