// Gradients and weights between the ranks that hold copies of them (see ArenaRegion). Dense parameters go
// over all ranks, experts over dp: each rank sums the part that it owns, updates it, and gives it to the
// others.
#pragma once

#include "biomoe/core/context.h"
#include "biomoe/dist/mesh.h"
#include "biomoe/model/parameters.h"

namespace biomoe {

// Both of one region, of which there are several copies.

// In the part of gradients_A that this rank owns: the sum over the copies. The rest keeps what it had.
void reduce_gradients(Context& ctx, const Mesh& mesh, const ArenaRegion& region,
                      const TensorView& gradients_A);

// Every rank's part of weights_A becomes that of its owner: the same bits everywhere.
void gather_weights(Context& ctx, const Mesh& mesh, const ArenaRegion& region, const TensorView& weights_A);

}  // namespace biomoe
