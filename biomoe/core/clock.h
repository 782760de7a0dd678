// The clock that durations are measured with.
#pragma once

#include <chrono>

namespace biomoe {

// Seconds of a monotonic clock.
inline double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace biomoe
