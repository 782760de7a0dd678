#include "biomoe/dist/watchdog.h"

#include <unistd.h>

#include <chrono>

namespace biomoe {

void give_up(const std::string& line) {
  const std::string text = "biomoe: " + line + "\n";
  const ssize_t ignored = write(STDERR_FILENO, text.data(), text.size());
  static_cast<void>(ignored);
  _exit(1);  // not through a library, which would wait for the rank that does not answer
}

Watchdog::Watchdog(double timeout_s, std::string line) {
  thread_ = std::thread([this, timeout_s, line = std::move(line)] {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, std::chrono::duration<double>(timeout_s), [this] { return done_; }))
      give_up(line);
  });
}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    done_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

}  // namespace biomoe
