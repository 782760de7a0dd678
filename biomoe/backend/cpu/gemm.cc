#include "biomoe/ops/gemm.h"

#include "biomoe/backend/cpu/parallel.h"
#include "biomoe/backend/cpu/sgemm.h"

namespace biomoe::cpu {

void gemm(Context& ctx, const GemmArgs& args) {
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
