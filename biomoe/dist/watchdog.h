// Watchdog: ends the process with a line when a call that cannot be given a time limit does not return.
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

namespace biomoe {

// Writes "biomoe: LINE" and ends the process with status 1, without waiting for anything.
[[noreturn]] void give_up(const std::string& line);

// From its construction until its end.
class Watchdog {
 public:
  Watchdog(double timeout_s, std::string line);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::thread thread_;
};

}  // namespace biomoe
