// A TCP socket, and the few things that the ranks' transport does with it. Waits end at a deadline.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "biomoe/core/descriptor.h"

namespace biomoe::tcp {

using Socket = Descriptor;

// IPv4 or IPv6, as numbers.
struct Address {
  std::string host;
  int port = 0;
};

// Listens on all of this host's addresses; port 0: one that is free, which local_port tells. Throws
// user_error when the port is in use.
Socket listen_at(int port);
int local_port(const Socket& socket);
std::string peer_host(const Socket& socket);

// The next connection; an empty one at the deadline (now_seconds). Connections are made non-blocking.
Socket accept_before(const Socket& listener, double deadline);
// Tries again until there is somebody; an empty one at the deadline. Throws user_error for a name that is no
// host's.
Socket connect_before(const Address& address, double deadline);

// All of the bytes, or false at the deadline or when the other side has gone.
bool send_before(const Socket& socket, std::span<const char> bytes, double deadline);
bool receive_before(const Socket& socket, std::span<char> bytes, double deadline);

}  // namespace biomoe::tcp
