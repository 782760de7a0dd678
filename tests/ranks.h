// Ranks of a test: threads, one each.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "biomoe/dist/group_comm.h"
#include "biomoe/dist/local/local_transport.h"

namespace biomoe::test {

// Calls body(rank) on `ranks` threads and waits; then rethrows the error of the lowest rank that has one.
inline void run_threads(int ranks, const std::function<void(int rank)>& body) {
  std::vector<std::exception_ptr> errors(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < errors.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(static_cast<int>(rank));
      } catch (...) {
        errors[rank] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

// Calls body(world) on `ranks` threads.
inline void run_ranks(int ranks, const std::function<void(std::unique_ptr<Comm> world)>& body,
                      double timeout_s = 20) {
  const auto transports = local_transports(ranks, timeout_s);
  run_threads(ranks,
              [&](int rank) { body(std::make_unique<GroupComm>(transports[static_cast<size_t>(rank)])); });
}

}  // namespace biomoe::test
