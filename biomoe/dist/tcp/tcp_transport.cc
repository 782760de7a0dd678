#include "biomoe/dist/tcp/tcp_transport.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <vector>

#include "biomoe/core/clock.h"
#include "biomoe/core/error.h"
#include "biomoe/dist/tcp/socket.h"
#include "biomoe/dist/watchdog.h"

namespace biomoe::tcp {
namespace {

constexpr uint64_t kMagic = 0x31656f6d6f6962;  // "biomoe1"
constexpr size_t kHostBytes = 48;              // an address as numbers

// What a rank says of itself when it connects.
struct Greeting {
  uint64_t magic = kMagic;
  int32_t rank = 0, size = 0;
  int32_t port = 0;  // where it listens for ranks above it
  int32_t unused = 0;
};

// Where a rank listens, as rank 0 tells the others.
struct Seat {
  std::array<char, kHostBytes> host{};
  int32_t port = 0;
};

// Before every message.
struct Header {
  uint64_t bytes = 0;
  int64_t tag = 0;
};

template <typename T>
std::span<char> bytes_of(T& value) {
  return {reinterpret_cast<char*>(&value), sizeof(value)};
}

// The messages of one call to and from one rank, in their order. Of every two ranks both make the calls that
// they have in common in the same order, so a connection needs no tags to be sorted by; they are compared.
struct Lane {
  std::vector<const Message*> messages{};
  size_t next = 0;    // message
  size_t offset = 0;  // bytes of it that have gone, its header's first
  Header header{};
  void clear() {
    messages.clear();
    next = offset = 0;
  }
  bool done() const { return next == messages.size(); }
};

class TcpTransport : public Transport {
 public:
  TcpTransport(const Rendezvous& at, double timeout_s)
      : rank_(at.rank), size_(at.size), timeout_s_(timeout_s), sockets_(static_cast<size_t>(at.size)) {
    out_.resize(sockets_.size());
    in_.resize(sockets_.size());
    polled_.reserve(sockets_.size());
    meet(at);
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  void exchange(std::span<const Message> sends, std::span<const Message> receives, int tag,
                std::string_view what) override {
    for (auto* lanes : {&out_, &in_})
      for (Lane& lane : *lanes) lane.clear();
    for (const Message& message : sends) out_[static_cast<size_t>(message.peer)].messages.push_back(&message);
    for (const Message& message : receives)
      in_[static_cast<size_t>(message.peer)].messages.push_back(&message);
    const double deadline = now_seconds() + timeout_s_;
    for (;;) {
      bool waiting = false;
      polled_.clear();
      for (size_t peer = 0; peer < sockets_.size(); ++peer) {
        if (!send_some(peer, tag) || !receive_some(peer, tag, what))
          give_up(fmt::format("rank {}: {}: rank {} has gone", rank_, what, peer));
        const short events =
            static_cast<short>((out_[peer].done() ? 0 : POLLOUT) | (in_[peer].done() ? 0 : POLLIN));
        if (events == 0) continue;
        waiting = true;
        polled_.push_back({.fd = sockets_[peer].get(), .events = events, .revents = 0});
      }
      if (!waiting) return;
      const double left = deadline - now_seconds();
      if (left <= 0) {
        give_up(fmt::format("rank {}: {} did not complete within {:.3g} s: waiting for rank {}", rank_, what,
                            timeout_s_, first_waited_for()));
      }
      poll(polled_.data(), polled_.size(), static_cast<int>(std::min(left, 1.0) * 1000) + 1);
    }
  }

 private:
  // Rank 0 hears where the others listen and tells all; then every rank connects to those below it.
  void meet(const Rendezvous& at) {
    const double deadline = now_seconds() + timeout_s_;
    if (rank_ == 0) {
      const Socket listener = listen_at(at.port);
      std::vector<Seat> seats(sockets_.size());
      for (int others = 1; others < size_; ++others) {
        auto [socket, greeting] = welcome(listener, deadline);
        Seat& seat = seats[static_cast<size_t>(greeting.rank)];
        const std::string host = peer_host(socket);
        std::memcpy(seat.host.data(), host.data(), std::min(host.size(), kHostBytes - 1));
        seat.port = greeting.port;
        sockets_[static_cast<size_t>(greeting.rank)] = std::move(socket);
      }
      for (size_t peer = 1; peer < sockets_.size(); ++peer) {
        const auto* bytes = reinterpret_cast<const char*>(seats.data());
        if (!send_before(sockets_[peer], {bytes, seats.size() * sizeof(Seat)}, deadline)) late();
      }
      return;
    }
    const Socket listener = listen_at(0);
    sockets_[0] = introduce({at.host, at.port}, local_port(listener), deadline);
    std::vector<Seat> seats(sockets_.size());
    auto* bytes = reinterpret_cast<char*>(seats.data());
    if (!receive_before(sockets_[0], {bytes, seats.size() * sizeof(Seat)}, deadline)) late();
    for (int peer = 1; peer < rank_; ++peer) {
      Seat& seat = seats[static_cast<size_t>(peer)];
      seat.host.back() = '\0';
      sockets_[static_cast<size_t>(peer)] = introduce({seat.host.data(), seat.port}, 0, deadline);
    }
    for (int others = rank_ + 1; others < size_; ++others) {
      auto [socket, greeting] = welcome(listener, deadline);
      sockets_[static_cast<size_t>(greeting.rank)] = std::move(socket);
    }
  }

  Socket introduce(const Address& address, int port, double deadline) {
    Socket socket = connect_before(address, deadline);
    Greeting greeting{.rank = rank_, .size = size_, .port = port};
    if (!socket || !send_before(socket, bytes_of(greeting), deadline)) late();
    return socket;
  }

  struct Guest {
    Socket socket;
    Greeting greeting;
  };
  // The next rank that connects. Others than ranks of this run, who may be anybody, are sent away.
  Guest welcome(const Socket& listener, double deadline) {
    for (;;) {
      Guest guest{.socket = accept_before(listener, deadline), .greeting = {.magic = 0}};
      if (!guest.socket) late();
      const double patience = std::min(deadline, now_seconds() + 1.0);
      if (!receive_before(guest.socket, bytes_of(guest.greeting), patience)) continue;
      const Greeting& greeting = guest.greeting;
      if (greeting.magic != kMagic || greeting.rank <= rank_ || greeting.rank >= size_) continue;
      if (greeting.size != size_) {
        throw user_error("rank {} was started with WORLD_SIZE={} and rank {} with {}", greeting.rank,
                         greeting.size, rank_, size_);
      }
      if (sockets_[static_cast<size_t>(greeting.rank)])
        throw user_error("two processes were started with RANK={}", greeting.rank);
      return guest;
    }
  }

  [[noreturn]] void late() const {
    std::string missing;
    for (size_t peer = 0; peer < sockets_.size(); ++peer) {
      if (static_cast<int>(peer) == rank_ || sockets_[peer]) continue;
      missing += fmt::format("{}{}", missing.empty() ? "" : ", ", peer);
    }
    throw failure("rank {}: start-up of the ranks did not complete within {:.3g} s: waiting for rank {}",
                  rank_, timeout_s_, missing.empty() ? "0" : missing);
  }

  // As much as the connection takes now; false when the other side has gone.
  bool send_some(size_t peer, int tag) {
    Lane& lane = out_[peer];
    while (!lane.done()) {
      const Message& message = *lane.messages[lane.next];
      lane.header = {message.bytes, tag};
      const bool head = lane.offset < sizeof(Header);
      const char* from = head ? bytes_of(lane.header).data() + lane.offset
                              : static_cast<const char*>(message.data) + (lane.offset - sizeof(Header));
      const size_t left = (head ? sizeof(Header) : sizeof(Header) + message.bytes) - lane.offset;
      const ssize_t count = left == 0 ? 0 : send(sockets_[peer].get(), from, left, MSG_NOSIGNAL);
      if (count < 0) return errno == EAGAIN || errno == EINTR;
      advance(lane, static_cast<size_t>(count), message.bytes);
    }
    return true;
  }

  bool receive_some(size_t peer, int tag, std::string_view what) {
    Lane& lane = in_[peer];
    while (!lane.done()) {
      const Message& message = *lane.messages[lane.next];
      const bool head = lane.offset < sizeof(Header);
      char* to = head ? bytes_of(lane.header).data() + lane.offset
                      : static_cast<char*>(message.data) + (lane.offset - sizeof(Header));
      const size_t left = (head ? sizeof(Header) : sizeof(Header) + message.bytes) - lane.offset;
      if (left > 0) {
        const ssize_t count = recv(sockets_[peer].get(), to, left, 0);
        if (count == 0) return false;
        if (count < 0) return errno == EAGAIN || errno == EINTR;
        lane.offset += static_cast<size_t>(count);
      }
      if (head && lane.offset == sizeof(Header)) {
        BM_CHECK(lane.header.bytes == message.bytes && lane.header.tag == tag,
                 "rank {}: {}: rank {} sent {} bytes of group {}, {} of group {} were expected", rank_, what,
                 peer, lane.header.bytes, lane.header.tag, message.bytes, tag);
      }
      advance(lane, 0, message.bytes);
    }
    return true;
  }

  static void advance(Lane& lane, size_t count, size_t bytes) {
    lane.offset += count;
    if (lane.offset < sizeof(Header) + bytes) return;
    ++lane.next;
    lane.offset = 0;
  }

  size_t first_waited_for() const {
    for (size_t peer = 0; peer < sockets_.size(); ++peer)
      if (!in_[peer].done() || !out_[peer].done()) return peer;
    return 0;
  }

  int rank_, size_;
  double timeout_s_;
  std::vector<Socket> sockets_;  // by rank; none to itself
  std::vector<Lane> out_, in_;
  std::vector<pollfd> polled_;
};

}  // namespace

std::shared_ptr<Transport> start(const Rendezvous& at, double timeout_s) {
  return std::make_shared<TcpTransport>(at, timeout_s);
}

}  // namespace biomoe::tcp
