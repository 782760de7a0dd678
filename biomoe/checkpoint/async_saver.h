// Saves checkpoints while training goes on.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "biomoe/checkpoint/training_checkpoint.h"
#include "biomoe/core/arena.h"

namespace biomoe {

// Copies the tensors into memory of its own, allocated once, and writes them from there in a background
// thread; at most one save is in flight. Used by one thread.
class AsyncSaver {
 public:
  // `sources` are the tensors that every save copies; the memory they view must outlive this object.
  // Allocates staging_bytes(sources) and starts the thread. failure when the memory is refused.
  AsyncSaver(CheckpointStore store, const std::vector<TensorGroup>& sources);
  // Waits for the save in flight. An error that nobody has been told goes to the store's warn function.
  ~AsyncSaver();
  AsyncSaver(const AsyncSaver&) = delete;
  AsyncSaver& operator=(const AsyncSaver&) = delete;

  // Waits for the former save and throws its error, if it failed (then nothing new is started); else copies
  // the tensors and returns. The copy is the only work done here.
  void save(int64_t step, nlohmann::json state);

  // Blocks until nothing is in flight; throws the error of the last save once.
  void wait();

  // What the last save that succeeded reports; call after wait().
  const std::optional<SaveReport>& last_report() const { return last_report_; }

  static uint64_t staging_bytes(const std::vector<TensorGroup>& sources);

 private:
  void run();

  CheckpointStore store_;
  std::vector<TensorGroup> sources_;
  Arena arena_;
  std::vector<TensorGroup> staged_;

  std::mutex mutex_;
  std::condition_variable changed_;
  bool pending_ = false;  // a save is waiting or being written
  bool stop_ = false;
  int64_t step_ = 0;
  nlohmann::json state_;
  std::exception_ptr error_;
  std::optional<SaveReport> last_report_;
  std::thread thread_;  // last: starts when everything above is there
};

}  // namespace biomoe
