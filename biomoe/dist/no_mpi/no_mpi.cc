// Stands for dist/mpi where no MPI was found.
#include "biomoe/core/error.h"
#include "biomoe/dist/transport.h"

namespace biomoe::mpi {

std::shared_ptr<Transport> start(double) {
  throw user_error(
      "this program was built without MPI, which ranks need; install it (Debian: libopenmpi-dev "
      "openmpi-bin), configure and build again");
}

std::string_view library() {
  return "";
}

}  // namespace biomoe::mpi
