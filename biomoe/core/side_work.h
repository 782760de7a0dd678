// Work that one CPU thread may do beside an operation.
#pragma once

namespace biomoe {

// An operation whose threads take items as they become free lets the last of them do pieces of such work
// first (see backend/cpu/parallel.h): one that waits for memory beside others that compute.
class SideWork {
 public:
  virtual ~SideWork() = default;
  // Does a piece, within a millisecond or so; false when none is left. Only one thread calls it at a time.
  virtual bool do_piece() = 0;
};

}  // namespace biomoe
