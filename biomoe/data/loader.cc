#include "biomoe/data/loader.h"

#include <algorithm>
#include <utility>

#include "biomoe/core/error.h"

namespace biomoe {
namespace {

constexpr int64_t kSlotsPerWorker = 2;  // one being filled, one waiting to be taken

size_t num_slots(const LoaderOptions& options) {
  return static_cast<size_t>(std::max<int64_t>(kSlotsPerWorker * options.num_workers, 1));
}

const SequencePart& checked(const std::shared_ptr<const SequencePart>& part) {
  BM_CHECK(part && part->store, "a loader without sequences");
  return *part;
}

}  // namespace

Loader::Loader(std::shared_ptr<const SequencePart> part, const Vocabulary& vocabulary,
               const LoaderOptions& options, const LoaderPosition& start)
    : part_(std::move(part)),
      options_(options),
      planner_(checked(part_).windows, options.plan),
      assembler_(*part_->store, vocabulary, options.policies, part_->windows.options(),
                 options.plan.reverse_complement_prob),
      slots_(num_slots(options)) {
  if (options.policies.score_each_base_once && options.plan.reverse_complement_prob > 0)
    throw user_error("reverse_complement_prob must be 0 where each base is scored once");
  for (Slot& slot : slots_) {
    slot.batch.reserve(options.plan.token_micro_batch_size);
    slot.plan.reserve(static_cast<size_t>(planner_.max_sequences()));
  }
  seek(start);
}

size_t Loader::planned_bytes(const LoaderOptions& options, const WindowIndex& windows) {
  const BatchPlanner planner(windows, options.plan);
  const auto sequences = static_cast<size_t>(planner.max_sequences());
  return num_slots(options) *
         (Batch::planned_bytes(options.plan.token_micro_batch_size) + sequences * sizeof(PlannedSequence));
}

Loader::~Loader() {
  stop_workers();
}

void Loader::start_workers() {
  // Allocated here, since a worker may get its first turn late in a run.
  const std::vector<uint8_t> scratch(static_cast<size_t>(part_->windows.options().max_seq_length) + 1);
  for (int64_t i = 0; i < options_.num_workers; ++i) {
    workers_.emplace_back([this, own = scratch]() mutable { work(own); });
  }
}

void Loader::stop_workers() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  slot_free_.notify_all();
  for (std::thread& worker : workers_) worker.join();
  workers_.clear();
  stopping_ = false;
}

void Loader::seek(const LoaderPosition& position) {
  BM_CHECK(position.sample >= 0 && position.micro_batch >= 0,
           "a loader position of sample {}, micro-batch {}", position.sample, position.micro_batch);
  stop_workers();
  for (Slot& slot : slots_) {
    slot.ready = slot.end = false;
    slot.error = nullptr;
  }
  planner_.seek(position);
  position_ = position;
  planned_ = given_ = 0;
  all_planned_ = false;
  start_workers();
}

void Loader::plan_slot(Slot& slot) {
  try {
    slot.end = !planner_.plan_round(slot.plan);
    slot.after = planner_.position();
  } catch (...) {
    slot.error = std::current_exception();
  }
  ++planned_;
  if (slot.end || slot.error) all_planned_ = true;
}

void Loader::fill_slot(Slot& slot, std::vector<uint8_t>& scratch) const {
  if (slot.end || slot.error) return;
  try {
    slot.batch.reserve(options_.plan.token_micro_batch_size);
    assembler_.assemble(slot.plan, slot.batch, scratch);
  } catch (...) {
    slot.error = std::current_exception();
  }
}

void Loader::work(std::vector<uint8_t>& scratch) {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    const auto capacity = static_cast<int64_t>(slots_.size());
    slot_free_.wait(lock, [&] { return stopping_ || all_planned_ || planned_ - given_ < capacity; });
    if (stopping_ || all_planned_) return;
    Slot& slot = slots_[static_cast<size_t>(planned_ % capacity)];
    plan_slot(slot);
    lock.unlock();
    fill_slot(slot, scratch);
    lock.lock();
    slot.ready = true;
    slot_ready_.notify_one();
  }
}

bool Loader::next(Batch& batch, std::vector<SequenceSource>* sources) {
  std::unique_lock<std::mutex> lock(mutex_);
  Slot& slot = slots_[static_cast<size_t>(given_ % static_cast<int64_t>(slots_.size()))];
  if (workers_.empty() && !slot.ready) {
    plan_slot(slot);
    fill_slot(slot, scratch_);
    slot.ready = true;
  }
  slot_ready_.wait(lock, [&] { return slot.ready; });
  if (slot.error) std::rethrow_exception(slot.error);
  if (slot.end) return false;
  std::swap(batch, slot.batch);
  position_ = slot.after;
  counts_ += batch.counts;
  if (sources != nullptr) {
    sources->clear();
    for (const PlannedSequence& s : slot.plan)
      sources->push_back({.record = s.record,
                          .begin = s.begin,
                          .bases = s.length,
                          .window = s.window,
                          .reversed = s.reversed});
  }
  slot.ready = false;
  ++given_;
  lock.unlock();
  slot_free_.notify_one();
  return true;
}

}  // namespace biomoe
