#include "biomoe/ops/gemm.h"

#include "biomoe/backend/cpu/mx_products.h"
#include "biomoe/backend/cpu/parallel.h"
#include "biomoe/backend/cpu/sgemm.h"

namespace biomoe::cpu {

void gemm(Context& ctx, const GemmArgs& args) {
  if (args.mx_codes) {  // the product of what they stand for
    const MxProduct product = args.transpose_a   ? MxProduct::kWgrad
                              : args.transpose_b ? MxProduct::kForward
                                                 : MxProduct::kDgrad;
    const Shape &a = args.a.shape, &b = args.b.shape;
    DecodedMx decoded = decode_mx(args.mx_codes, product, a[0],
                                  args.transpose_a ? Shape{1, a[1], b[1]} : Shape{1, b[0], b[1]});
    GemmArgs plain = args;
    plain.mx_codes = {};
    plain.a = TensorView(decoded.a.data(), DType::kF32, a);
    plain.b = TensorView(decoded.b.data(), DType::kF32, b);
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
  parallel_items(ctx, tiling.count(), [&](int64_t tile, int) { sgemm_tile(c, a, b, tiling, tile); });
}

}  // namespace biomoe::cpu
