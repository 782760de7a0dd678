#include "biomoe/optim/replicas.h"

#include "biomoe/ops/comm_clock.h"

namespace biomoe {
namespace {

Comm& ranks_of(const Mesh& mesh, const ArenaRegion& region) {
  return region.experts ? mesh.dp_beside() : mesh.world_beside();
}

}  // namespace

void reduce_gradients(Context& ctx, const Mesh& mesh, const ArenaRegion& region,
                      const TensorView& gradients_A) {
  const CommSpan span(ctx);
  ranks_of(mesh, region)
      .reduce_scatter(ctx, gradients_A.rows(region.held, region.count),
                      gradients_A.rows(region.own, region.owned_count()), ReduceOp::kSum,
                      region.experts ? "the experts' gradients" : "the gradients");
}

void gather_weights(Context& ctx, const Mesh& mesh, const ArenaRegion& region, const TensorView& weights_A) {
  const CommSpan span(ctx);
  ranks_of(mesh, region)
      .all_gather(ctx, weights_A.rows(region.own, region.owned_count()),
                  weights_A.rows(region.held, region.count),
                  region.experts ? "the experts' weights" : "the weights");
}

}  // namespace biomoe
