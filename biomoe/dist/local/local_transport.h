// Ranks that are threads of one process: for tests, and, with one rank, for a run that is alone.
#pragma once

#include <memory>
#include <vector>

#include "biomoe/dist/comm.h"
#include "biomoe/dist/transport.h"

namespace biomoe {

// The transports of `size` ranks, to be used by a thread each. Errors are thrown and do not end the process.
std::vector<std::shared_ptr<Transport>> local_transports(int size, double timeout_s);

// The group of one rank.
std::unique_ptr<Comm> single_comm();

}  // namespace biomoe
