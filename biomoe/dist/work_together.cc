#include "biomoe/dist/work_together.h"

#include <chrono>
#include <exception>
#include <future>
#include <string>

#include "biomoe/core/error.h"

namespace biomoe {
namespace {

constexpr std::chrono::milliseconds kBetweenWords{100};
constexpr char kGood = ' ';  // of an outcome; else 'u' or 'f', for the kind of the error, and its text

// Waits for the work: how it ended, for the other ranks.
std::string outcome_of(std::future<void>& work, std::exception_ptr& error) {
  try {
    work.get();
    return {kGood};
  } catch (const Error& thrown) {
    error = std::current_exception();
    return (thrown.kind() == ErrorKind::kUser ? "u" : "f") + std::string(thrown.what());
  } catch (const std::exception& thrown) {
    error = std::current_exception();
    return "f" + std::string(thrown.what());
  }
}

}  // namespace

void work_together(Comm& ranks, std::string_view what, const std::function<void()>& work) {
  if (ranks.size() == 1) return work();
  auto running = std::async(std::launch::async, work);
  for (int64_t busy = 1; busy > 0;) {
    const bool done = running.wait_for(kBetweenWords) == std::future_status::ready;
    busy = all_reduce_value(ranks, int64_t{done ? 0 : 1}, ReduceOp::kSum, what);
  }
  std::exception_ptr error;
  const auto outcomes = all_gather_text(ranks, outcome_of(running, error), what);
  if (error) std::rethrow_exception(error);
  for (size_t rank = 0; rank < outcomes.size(); ++rank) {
    const std::string& outcome = outcomes[rank];
    if (outcome.front() == kGood) continue;
    const ErrorKind kind = outcome.front() == 'u' ? ErrorKind::kUser : ErrorKind::kFailure;
    throw Error(kind, fmt::format("rank {}: {}", rank, outcome.substr(1)));
  }
}

}  // namespace biomoe
