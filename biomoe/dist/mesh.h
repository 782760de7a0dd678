// Mesh: the ranks of a run as dp x ep, ep fastest: rank = dp_rank * ep_size + ep_rank. Experts are split over
// ep and held again by every dp; everything else is held by every rank.
#pragma once

#include <cstdint>
#include <memory>

#include "biomoe/dist/comm.h"

namespace biomoe {

struct MeshSize {
  int64_t dp = 1;
  int64_t ep = 1;
  int64_t world() const { return dp * ep; }
};

// The sizes of a mesh that is only planned; dp_size = 0 stands for 1. Throws user_error, naming the keys of
// the section `parallelism`, for sizes that no mesh has or that the experts do not divide by.
MeshSize planned_mesh(int64_t dp_size, int64_t ep_size, int64_t num_experts);

// The sizes for `world` ranks; dp_size = 0 stands for as many as ep leaves. Throws user_error as
// planned_mesh, and when dp * ep is not the world.
MeshSize resolve_mesh(int64_t dp_size, int64_t ep_size, int64_t world, int64_t num_experts);

// Where a rank stands in its mesh; the default is a rank that is alone.
struct MeshPlace {
  MeshSize size;
  int64_t dp_rank = 0;
  int64_t ep_rank = 0;
  // Whether of what several ranks hold copies of each keeps a part, and the whole only while it is used
  // (ZeRO-3).
  bool shards = false;
  int64_t rank() const { return dp_rank * size.ep + ep_rank; }
};

class Mesh {
 public:
  Mesh();  // of one rank
  // `world` has size.world() ranks. All ranks make their meshes together.
  Mesh(std::unique_ptr<Comm> world, MeshSize size);

  MeshPlace place(bool shards = false) const { return {size_, dp_->rank(), ep_->rank(), shards}; }
  int rank() const { return world_->rank(); }
  int size() const { return world_->size(); }
  bool alone() const { return size() == 1; }

  Comm& world() const { return *world_; }
  Comm& ep() const { return *ep_; }  // the ranks that share the experts out among them
  Comm& dp() const { return *dp_; }  // the ranks that hold the same experts
  // For what runs beside operations, see Comm::twin.
  Comm& world_beside() const { return world_twin_ ? *world_twin_ : *world_; }
  Comm& dp_beside() const { return dp_twin_ ? *dp_twin_ : *dp_; }

 private:
  MeshSize size_;
  std::unique_ptr<Comm> world_, ep_, dp_;
  std::unique_ptr<Comm> world_twin_, dp_twin_;  // null where there are none
};

}  // namespace biomoe
