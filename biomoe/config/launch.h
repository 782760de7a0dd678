// How this process was started: alone, or as one of several by mpirun, srun or torchrun.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace biomoe {

enum class Launcher : uint8_t { kNone, kMpi, kSrun, kTorchrun };

struct Launch {
  Launcher launcher = Launcher::kNone;
  int64_t processes = 1;  // as the launcher says
  // torchrun's variables only:
  int64_t rank = 0;
  std::string host{};  // of rank 0; "" where it is not told
  int64_t port = 0;    // that rank 0 may listen at; 0 where it is not told
};

// From the variables that launchers set: OMPI_COMM_WORLD_SIZE (Open MPI), PMI_SIZE (MPICH, Intel MPI, srun
// --mpi=pmi2), PMIX_RANK (srun --mpi=pmix): MPI can start. SLURM_STEP_NUM_TASKS alone: srun without MPI.
// WORLD_SIZE and RANK, with MASTER_ADDR and MASTER_PORT: torchrun, and what sets the same; torchrun itself
// listens at that port (TORCHELASTIC_USE_AGENT_STORE), so that rank 0 takes the next one. kNone where there
// is one process; user_error where torchrun's are no numbers. `variable` gives the value of a name, if set;
// without it the environment is read.
Launch read_launch(const std::function<std::optional<std::string>(const char*)>& variable = {});

}  // namespace biomoe
