#include "biomoe/dist/mesh.h"

#include <algorithm>

#include "biomoe/core/error.h"
#include "biomoe/dist/local/local_transport.h"

namespace biomoe {

MeshSize planned_mesh(int64_t dp_size, int64_t ep_size, int64_t num_experts) {
  if (ep_size < 1) throw user_error("parallelism.ep_size={} is below 1", ep_size);
  if (dp_size < 0)
    throw user_error("parallelism.dp_size={} is below 0 (0: as many as ep_size leaves)", dp_size);
  if (num_experts % ep_size != 0) {
    throw user_error(
        "config_kwargs.num_local_experts={} does not divide by parallelism.ep_size={}: every rank holds as "
        "many",
        num_experts, ep_size);
  }
  constexpr int64_t kMostRanks = int64_t{1} << 30;  // whose product with the experts is no overflow
  if (dp_size > kMostRanks) {
    throw user_error("parallelism.dp_size={} is for more ranks than there can be", dp_size);
  }
  return {std::max<int64_t>(1, dp_size), ep_size};
}

MeshSize resolve_mesh(int64_t dp_size, int64_t ep_size, int64_t world, int64_t num_experts) {
  BM_CHECK(world >= 1, "a world of {} ranks", world);
  planned_mesh(dp_size, ep_size, num_experts);
  const int64_t dp = dp_size > 0 ? dp_size : world / ep_size;
  if (dp > world || dp * ep_size != world) {
    throw user_error(
        "parallelism.ep_size={} and dp_size={} are for {} ranks, and {} are here; start that many (mpirun "
        "-np), or change the sizes",
        ep_size, dp_size,
        dp_size > 0 ? fmt::format("{}", dp_size * ep_size) : fmt::format("a multiple of {}", ep_size), world);
  }
  return {dp, ep_size};
}

Mesh::Mesh() : world_(single_comm()), ep_(single_comm()), dp_(single_comm()) {}

Mesh::Mesh(std::unique_ptr<Comm> world, MeshSize size) : size_(size), world_(std::move(world)) {
  BM_CHECK(world_->size() == size_.world(), "a mesh of {} x {} for {} ranks", size_.dp, size_.ep,
           world_->size());
  const int64_t dp_rank = world_->rank() / size_.ep, ep_rank = world_->rank() % size_.ep;
  ep_ = world_->split(dp_rank, ep_rank);
  dp_ = world_->split(ep_rank, dp_rank);
  world_twin_ = world_->twin();
  if (world_twin_) dp_twin_ = world_twin_->split(ep_rank, dp_rank);
}

}  // namespace biomoe
