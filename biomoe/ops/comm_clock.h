// CommClock: how long a context's operations wait for communication between ranks, its own work and the wait
// for slower ranks included. Communication beside operations counts with what is left of it when they meet.
#pragma once

#include <memory>
#include <vector>

#include "biomoe/ops/device.h"

namespace biomoe {

class CommClock {
 public:
  void begin(Context& ctx);  // one span at a time; not while a step is recorded
  void end();
  // The sum of all spans so far, from which on it counts from zero. Waits for the device.
  double total_ms_sync();

 private:
  std::vector<std::unique_ptr<DeviceTimer>> spans_;
  size_t used_ = 0;
};

// A span of the context's clock, where it has one.
class CommSpan {
 public:
  explicit CommSpan(Context& ctx) : clock_(ctx.comm_clock) {
    if (clock_) clock_->begin(ctx);
  }
  ~CommSpan() {
    if (clock_) clock_->end();
  }
  CommSpan(const CommSpan&) = delete;
  CommSpan& operator=(const CommSpan&) = delete;

 private:
  CommClock* clock_;
};

}  // namespace biomoe
