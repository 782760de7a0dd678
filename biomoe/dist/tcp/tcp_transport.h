// Ranks that find each other by the variables that torchrun sets, and talk over TCP.
#pragma once

#include <memory>
#include <string>

#include "biomoe/dist/transport.h"

namespace biomoe::tcp {

// One rank of a run: all give the same size, host and port, at which rank 0 listens.
struct Rendezvous {
  int rank = 0;
  int size = 1;
  std::string host;
  int port = 0;
};

// Meets the other ranks; every two of them have a connection. Throws user_error when the port is in use on
// rank 0's host or the host's name means nothing, and failure when not all ranks have come in time.
std::shared_ptr<Transport> start(const Rendezvous& at, double timeout_s);

}  // namespace biomoe::tcp
