#include "biomoe/dist/tcp/socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <thread>

#include "biomoe/core/clock.h"
#include "biomoe/core/error.h"

namespace biomoe::tcp {
namespace {

constexpr auto kRetry = std::chrono::milliseconds(50);

void prepare(const Socket& socket) {
  const int on = 1;
  setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  fcntl(socket.get(), F_SETFL, fcntl(socket.get(), F_GETFL) | O_NONBLOCK);
  fcntl(socket.get(), F_SETFD, FD_CLOEXEC);
}

// Whether the socket is ready for `events` before the deadline.
bool ready_before(const Socket& socket, short events, double deadline) {
  for (;;) {
    const double left = deadline - now_seconds();
    if (left <= 0) return false;
    pollfd entry{.fd = socket.get(), .events = events, .revents = 0};
    const int count = poll(&entry, 1, static_cast<int>(left * 1000) + 1);
    if (count > 0) return true;
    if (count < 0 && errno != EINTR) return false;
  }
}

struct FreeAddresses {
  void operator()(addrinfo* list) const { freeaddrinfo(list); }
};

std::unique_ptr<addrinfo, FreeAddresses> look_up(const Address& address) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  const int error = getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &list);
  if (error != 0) {
    throw user_error("MASTER_ADDR={}: {}; set it to the host of rank 0", address.host, gai_strerror(error));
  }
  return std::unique_ptr<addrinfo, FreeAddresses>(list);
}

Socket connect_once(const addrinfo& address, double deadline) {
  Socket socket(::socket(address.ai_family, address.ai_socktype, address.ai_protocol));
  if (!socket) return {};
  prepare(socket);
  if (connect(socket.get(), address.ai_addr, address.ai_addrlen) == 0) return socket;
  if (errno != EINPROGRESS || !ready_before(socket, POLLOUT, deadline)) return {};
  int error = 0;
  socklen_t size = sizeof(error);
  getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  return error == 0 ? std::move(socket) : Socket();
}

}  // namespace

// A socket for IPv6 takes IPv4 as well; where there is no IPv6, one for IPv4.
Socket listen_at(int port) {
  const int off = 0, on = 1;
  sockaddr_in6 any6{};
  any6.sin6_family = AF_INET6;
  any6.sin6_port = htons(static_cast<uint16_t>(port));
  sockaddr_in any4{};
  any4.sin_family = AF_INET;
  any4.sin_port = any6.sin6_port;
  Socket socket(::socket(AF_INET6, SOCK_STREAM, 0));
  const bool six = static_cast<bool>(socket);
  if (!six) socket = Socket(::socket(AF_INET, SOCK_STREAM, 0));
  if (!socket) throw failure("cannot make a socket: {}", std::strerror(errno));
  if (six) setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
  setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  const auto* address =
      six ? reinterpret_cast<const sockaddr*>(&any6) : reinterpret_cast<const sockaddr*>(&any4);
  const socklen_t size = six ? sizeof(any6) : sizeof(any4);
  if (bind(socket.get(), address, size) != 0 || listen(socket.get(), SOMAXCONN) != 0) {
    throw user_error("port {} of this host cannot be listened at: {}; set MASTER_PORT to one that is free",
                     port, std::strerror(errno));
  }
  prepare(socket);
  return socket;
}

int local_port(const Socket& socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &size);
  return ntohs(address.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(address).sin6_port
                                             : reinterpret_cast<const sockaddr_in&>(address).sin_port);
}

std::string peer_host(const Socket& socket) {
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  std::array<char, NI_MAXHOST> host{};
  getpeername(socket.get(), reinterpret_cast<sockaddr*>(&address), &size);
  getnameinfo(reinterpret_cast<const sockaddr*>(&address), size, host.data(), host.size(), nullptr, 0,
              NI_NUMERICHOST);
  return host.data();
}

Socket accept_before(const Socket& listener, double deadline) {
  while (ready_before(listener, POLLIN, deadline)) {
    Socket socket(accept(listener.get(), nullptr, nullptr));
    if (!socket) continue;
    prepare(socket);
    return socket;
  }
  return {};
}

Socket connect_before(const Address& address, double deadline) {
  const auto list = look_up(address);
  while (now_seconds() < deadline) {
    for (const addrinfo* entry = list.get(); entry; entry = entry->ai_next) {
      if (Socket socket = connect_once(*entry, deadline)) return socket;
    }
    std::this_thread::sleep_for(kRetry);
  }
  return {};
}

bool send_before(const Socket& socket, std::span<const char> bytes, double deadline) {
  while (!bytes.empty()) {
    const ssize_t count = send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (count > 0) {
      bytes = bytes.subspan(static_cast<size_t>(count));
    } else if ((errno != EAGAIN && errno != EINTR) || !ready_before(socket, POLLOUT, deadline)) {
      return false;
    }
  }
  return true;
}

bool receive_before(const Socket& socket, std::span<char> bytes, double deadline) {
  while (!bytes.empty()) {
    const ssize_t count = recv(socket.get(), bytes.data(), bytes.size(), 0);
    if (count > 0) {
      bytes = bytes.subspan(static_cast<size_t>(count));
    } else if (count == 0 || (errno != EAGAIN && errno != EINTR) || !ready_before(socket, POLLIN, deadline)) {
      return false;
    }
  }
  return true;
}

}  // namespace biomoe::tcp
