// One checkpoint from many ranks, in the files that one rank would write: each rank puts its parts of the
// tensors into them, and none holds the whole.
#pragma once

#include <nlohmann/json.hpp>
#include <vector>

#include "biomoe/checkpoint/training_checkpoint.h"
#include "biomoe/dist/comm.h"

namespace biomoe {

// All ranks call it with the same groups and tensors, in the same order, and parts that together are every
// element once; a rank may have none of a tensor (an empty view). The store's folder is on a file system that
// all see. The first rank makes the folder and the files' headers; all write and fsync their parts and give
// the checksums of them to the first, which joins them, adds the state (`state` is read there only), renames
// the folder into place and prunes. What CheckpointStore::save promises holds: when a rank fails or dies,
// nothing of the attempt counts. failure on all ranks, naming the one where it happened.
SaveReport save_from_ranks(const CheckpointStore& store, Comm& ranks, int64_t step,
                           const std::vector<TensorGroup>& groups, const nlohmann::json& state);

}  // namespace biomoe
