// The ranks of a run: from what the launcher started to a mesh.
#pragma once

#include <cstdint>
#include <string>

#include "biomoe/config/config.h"
#include "biomoe/core/error.h"
#include "biomoe/dist/mesh.h"
#include "biomoe/train/run_config.h"

namespace biomoe {

struct Ranks {
  Mesh mesh;
  int64_t on_host = 1;    // ranks that share this one's host
  double timeout_s = 30;  // see ParallelismConfig
  bool first() const { return mesh.rank() == 0; }
};

// Joins the other processes when mpirun, srun or torchrun started this one, and settles what depends on them
// in `config`: parallelism.dp_size, the device, and num_threads = 0 as this rank's share of the host. Throws
// user_error: sizes that do not fit the ranks or the experts, ranks that were given other configurations
// (naming rank and key), another version, GPUs that are not there, launchers that MPI cannot join, a program
// built without MPI.
Ranks start_ranks(RunConfig& config);

// The first line in which the ranks' configurations differ from rank 0's, as an error of all ranks.
void require_same_config(Comm& world, RunConfig config);

// What each rank read, told so briefly that equal texts mean equal things: user_error on all ranks naming the
// first whose text is not that of rank 0.
void require_same(Comm& world, std::string_view what, const std::string& text);

// What a rank says of an error: with its number in front, and where it is not the first rank, after three
// seconds (or what others wait for less than, see parallelism.timeout_s) in which the end of the first, if it
// met the same, has ended this one.
Error error_of_rank(const Comm& world, const Error& error, double timeout_s);
inline Error error_of_rank(const Ranks& ranks, const Error& error) {
  return error_of_rank(ranks.mesh.world(), error, ranks.timeout_s);
}

}  // namespace biomoe
