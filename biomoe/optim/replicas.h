// Gradients and weights between the ranks that hold copies of them (see ArenaRegion). Dense parameters go
// over all ranks, experts over dp: each rank sums the part that it owns, updates it, and gives it to the
// others.
#pragma once

#include "biomoe/core/context.h"
#include "biomoe/dist/mesh.h"
#include "biomoe/model/parameters.h"

namespace biomoe {

// Both of one stage (see ParameterList::num_stages).

// In the parts of gradients_A that this rank owns: the sum over the copies. The rest keeps what it had.
void reduce_gradients(Context& ctx, const ParameterList& parameters, const Mesh& mesh,
                      const TensorView& gradients_A, int64_t stage);

// Every rank's part of weights_A becomes that of its owner: the same bits everywhere.
void gather_weights(Context& ctx, const ParameterList& parameters, const Mesh& mesh,
                    const TensorView& weights_A, int64_t stage);

}  // namespace biomoe
