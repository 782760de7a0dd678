#include <mpi.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "biomoe/core/clock.h"
#include "biomoe/core/error.h"
#include "biomoe/dist/transport.h"
#include "biomoe/dist/watchdog.h"

namespace biomoe::mpi {
namespace {

constexpr size_t kMostBytes = size_t{1} << 30;  // of one message: MPI counts in 32 bits
constexpr int kYields = 2000;                   // looks before the loop begins to sleep between them
constexpr auto kSleep = std::chrono::microseconds(50);

// The line that this process leaves when it is told to stop. mpirun tells the ranks so (SIGTERM) when another
// has died; the handler may only read what is here and write.
struct LastWords {
  std::atomic<bool> waiting{false};
  std::array<char, 96> idle{};
  std::array<char, 192> in_wait{};
};
LastWords g_last_words;

template <size_t N>
void keep_line(std::array<char, N>& kept, std::string line) {
  line.resize(std::min(line.size(), N - 2));
  line += '\n';
  std::memcpy(kept.data(), line.c_str(), line.size() + 1);
}

void write_line(std::string_view line) {
  const ssize_t ignored = write(STDERR_FILENO, line.data(), line.size());
  static_cast<void>(ignored);
}

extern "C" void told_to_stop(int) {
  const bool waiting = g_last_words.waiting.load(std::memory_order_acquire);
  const char* text = waiting ? g_last_words.in_wait.data() : g_last_words.idle.data();
  write_line({text, std::strlen(text)});
  _exit(1);
}

void check(int code, int rank, std::string_view what) {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  throw failure("rank {}: {}: MPI says: {}", rank, what,
                std::string_view(text.data(), static_cast<size_t>(length)));
}

class MpiTransport : public Transport {
 public:
  explicit MpiTransport(double timeout_s) : timeout_s_(timeout_s) {
    {
      const Watchdog watchdog(
          timeout_s, fmt::format("start-up of the ranks did not complete within {:.3g} s", timeout_s));
      int provided = 0;
      check(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided), 0, "MPI_Init_thread");
    }
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &size_);
    keep_line(g_last_words.idle,
              fmt::format("biomoe: rank {}: told to stop (SIGTERM) between operations", rank_));
    std::signal(SIGTERM, told_to_stop);
  }

  // After an error this rank ends alone, and the launcher ends the others; MPI_Finalize would wait for them.
  ~MpiTransport() override {
    std::signal(SIGTERM, SIG_DFL);
    if (std::uncaught_exceptions() > exceptions_) return;
    const Watchdog watchdog(
        timeout_s_,
        fmt::format("rank {}: the end of the run did not complete within {:.3g} s", rank_, timeout_s_));
    MPI_Finalize();
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  void exchange(std::span<const Message> sends, std::span<const Message> receives, int tag,
                std::string_view what) override {
    requests_.clear();
    peers_.clear();
    for (const Message& message : receives) post(message, tag, what, false);
    for (const Message& message : sends) post(message, tag, what, true);
    if (requests_.empty()) return;
    const double begin = now_seconds();
    for (int64_t looks = 0;; ++looks) {
      int done = 0;
      check(MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &done, MPI_STATUSES_IGNORE),
            rank_, what);
      if (done) break;
      if (looks < kYields) {
        sched_yield();
        continue;
      }
      if (looks == kYields) {
        keep_line(g_last_words.in_wait,
                  fmt::format("biomoe: rank {}: told to stop (SIGTERM) in {}, waiting for rank {}", rank_,
                              what, pending_peers()));
        g_last_words.waiting.store(true, std::memory_order_release);
      }
      if (now_seconds() - begin > timeout_s_) {
        const std::string peers = pending_peers();
        if (peers.empty()) continue;  // what was waited for has come since
        give_up(fmt::format("rank {}: {} did not complete within {:.3g} s: waiting for rank {}", rank_, what,
                            timeout_s_, peers));
      }
      std::this_thread::sleep_for(kSleep);
    }
    g_last_words.waiting.store(false, std::memory_order_release);
  }

 private:
  void post(const Message& message, int tag, std::string_view what, bool send) {
    for (size_t begin = 0; begin < message.bytes; begin += kMostBytes) {
      const int bytes = static_cast<int>(std::min(kMostBytes, message.bytes - begin));
      void* data = static_cast<char*>(message.data) + begin;
      MPI_Request& request = requests_.emplace_back(MPI_REQUEST_NULL);
      peers_.push_back(message.peer);
      check(send ? MPI_Isend(data, bytes, MPI_BYTE, message.peer, tag, MPI_COMM_WORLD, &request)
                 : MPI_Irecv(data, bytes, MPI_BYTE, message.peer, tag, MPI_COMM_WORLD, &request),
            rank_, what);
    }
  }

  std::string pending_peers() {
    std::vector<int> pending;
    for (size_t i = 0; i < requests_.size(); ++i) {
      int done = 0;
      if (MPI_Test(&requests_[i], &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && done) continue;
      pending.push_back(peers_[i]);
    }
    std::sort(pending.begin(), pending.end());
    pending.erase(std::unique(pending.begin(), pending.end()), pending.end());
    std::string text;
    for (const int peer : pending) text += fmt::format("{}{}", text.empty() ? "" : ", ", peer);
    return text;
  }

  int rank_ = 0, size_ = 1;
  double timeout_s_;
  int exceptions_ = std::uncaught_exceptions();
  std::vector<MPI_Request> requests_;
  std::vector<int> peers_;  // of the requests
};

}  // namespace

std::shared_ptr<Transport> start(double timeout_s) {
  return std::make_shared<MpiTransport>(timeout_s);
}

std::string_view library() {
  static const std::string name = [] {
    std::array<char, MPI_MAX_LIBRARY_VERSION_STRING> text{};
    int length = 0;
    MPI_Get_library_version(text.data(), &length);  // allowed before MPI_Init
    const std::string all(text.data(), static_cast<size_t>(length));
    return all.substr(0, all.find_first_of(",\n"));
  }();
  return name;
}

}  // namespace biomoe::mpi
