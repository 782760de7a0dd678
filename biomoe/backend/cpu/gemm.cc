#include "biomoe/ops/gemm.h"

#include "biomoe/backend/cpu/mx_products.h"
#include "biomoe/backend/cpu/parallel.h"
#include "biomoe/backend/cpu/sgemm.h"

namespace biomoe::cpu {

void gemm(Context& ctx, const GemmArgs& args) {
  if (args.mx_codes) {  // the product of what they stand for
    const MxGemm mx = mx_gemm_of(args);
    DecodedMx decoded = decode_mx(args.mx_codes, mx.product, args.a.shape[0], mx.weights_EOI);
    GemmArgs plain = args;
    plain.mx_codes = {};
    plain.a = TensorView(decoded.a.data(), DType::kF32, args.a.shape);
    plain.b = TensorView(decoded.b.data(), DType::kF32, args.b.shape);
    return cpu::gemm(ctx, plain);
  }
  const Matrix a{args.a.f32(), args.a.row_stride, args.transpose_a};
  const Matrix b{args.b.f32(), args.b.row_stride, args.transpose_b};
  const Product c{.data = args.c.f32(),
                  .stride = args.c.row_stride,
                  .rows = args.c.shape[0],
                  .columns = args.c.shape[1],
                  .inner = args.a.shape[args.transpose_a ? 0 : 1],
                  .accumulate = args.accumulate};
  const Tiling tiling = tile_product(c, a);
  parallel_items(ctx, tiling.count(), [&](int64_t item, int) {
    const Tile tile = tile_of(c, a, b, tiling, item);
    sgemm(tile.c, tile.a, tile.b);
  });
}

}  // namespace biomoe::cpu
