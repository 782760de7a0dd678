#include "biomoe/checkpoint/async_saver.h"

#include <cstring>
#include <utility>

#include "biomoe/core/error.h"

namespace biomoe {

AsyncSaver::AsyncSaver(CheckpointStore store, const std::vector<TensorGroup>& sources)
    : store_(std::move(store)),
      sources_(sources),
      arena_(staging_bytes(sources), "the copy that is being saved"),
      staged_(sources) {
  for (auto& group : staged_) {
    for (auto& tensor : group.tensors) {
      BM_CHECK(tensor.view && tensor.view.contiguous(), "{}/{} is absent or not contiguous", group.name,
               tensor.name);
      tensor.view = arena_.tensor(tensor.view.dtype, tensor.view.shape);
      std::memset(tensor.view.data, 0, tensor.view.bytes());  // pages are touched now, not in the first save
    }
  }
  thread_ = std::thread([this] { run(); });
}

AsyncSaver::~AsyncSaver() {
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !pending_; });
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
  if (!error_) return;
  try {
    std::rethrow_exception(error_);
  } catch (const std::exception& error) {
    store_.warn(error.what());
  }
}

void AsyncSaver::save(int64_t step, nlohmann::json state) {
  wait();
  for (size_t g = 0; g < sources_.size(); ++g) {
    for (size_t t = 0; t < sources_[g].tensors.size(); ++t) {
      const TensorView& source = sources_[g].tensors[t].view;
      if (source.bytes()) std::memcpy(staged_[g].tensors[t].view.data, source.data, source.bytes());
    }
  }
  {
    const std::lock_guard lock(mutex_);
    step_ = step;
    state_ = std::move(state);
    pending_ = true;
  }
  changed_.notify_all();
}

void AsyncSaver::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [this] { return !pending_; });
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void AsyncSaver::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return pending_ || stop_; });
    if (!pending_) return;
    lock.unlock();
    std::optional<SaveReport> report;
    std::exception_ptr error;
    try {
      report = store_.save(step_, staged_, state_);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (report) last_report_ = std::move(report);
    error_ = error;
    pending_ = false;
    changed_.notify_all();
  }
}

uint64_t AsyncSaver::staging_bytes(const std::vector<TensorGroup>& sources) {
  uint64_t bytes = 0;
  for (const auto& group : sources) {
    for (const auto& tensor : group.tensors) bytes += align_up(tensor.view.bytes());
  }
  return bytes;
}

}  // namespace biomoe
