// Transport: messages between the ranks of a run. Everything that a Comm on the host does is made of them.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string_view>

namespace biomoe {

struct Message {
  int peer = 0;  // another rank
  void* data = nullptr;
  size_t bytes = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Sends and receives all of these and returns when all are done. Messages of one tag between two ranks
  // match in their order and have the same size on both sides. When that takes longer than the timeout, the
  // transport gives up in one line "rank R: WHAT did not complete within S s: waiting for rank P": MPI's ends
  // the process with status 1, since the others cannot go on either; that of threads throws failure.
  virtual void exchange(std::span<const Message> sends, std::span<const Message> receives, int tag,
                        std::string_view what) = 0;

  // The first tag that no group which this rank is in has.
  int next_tag() const { return next_tag_; }
  void set_next_tag(int tag) { next_tag_ = tag; }

 private:
  int next_tag_ = 1;
};

namespace mpi {
// The processes that mpirun or srun started. Called once, by the main thread, which then makes all calls. The
// last owner lets go of MPI; when that happens because of an exception, without waiting for the other ranks.
// Throws user_error where the program was built without MPI (dist/no_mpi).
std::shared_ptr<Transport> start(double timeout_s);
// "Open MPI 4.1", or "" where the program was built without MPI.
std::string_view library();
}  // namespace mpi

}  // namespace biomoe
