#include "biomoe/ops/comm_clock.h"

namespace biomoe {

void CommClock::begin(Context& ctx) {
  if (used_ == spans_.size()) spans_.push_back(std::make_unique<DeviceTimer>(ctx));
  spans_[used_]->start();
}

void CommClock::end() {
  spans_[used_++]->stop();
}

double CommClock::total_ms_sync() {
  double total = 0;
  for (size_t i = 0; i < used_; ++i) total += spans_[i]->elapsed_ms_sync();
  used_ = 0;
  return total;
}

}  // namespace biomoe
