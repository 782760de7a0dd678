#include "biomoe/dist/local/local_transport.h"

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <tuple>

#include "biomoe/core/error.h"
#include "biomoe/dist/group_comm.h"

namespace biomoe {
namespace {

// Where senders leave their messages until the receivers have copied them.
struct Post {
  std::mutex mutex;
  std::condition_variable changed;
  struct Letter {
    const void* data;
    size_t bytes;
    int* waiting;  // of the sender: letters not yet copied
  };
  std::map<std::tuple<int, int, int>, std::deque<Letter>> letters;  // by sender, receiver, tag
};

class LocalTransport : public Transport {
 public:
  LocalTransport(std::shared_ptr<Post> post, int rank, int size, double timeout_s)
      : post_(std::move(post)), rank_(rank), size_(size), timeout_s_(timeout_s) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  void exchange(std::span<const Message> sends, std::span<const Message> receives, int tag,
                std::string_view what) override {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s_);
    std::unique_lock lock(post_->mutex);
    int waiting = static_cast<int>(sends.size());
    for (const Message& message : sends)
      post_->letters[{rank_, message.peer, tag}].push_back({message.data, message.bytes, &waiting});
    post_->changed.notify_all();
    for (const Message& message : receives) {
      auto& queue = post_->letters[{message.peer, rank_, tag}];
      if (!post_->changed.wait_until(lock, deadline, [&] { return !queue.empty(); }))
        give_up(what, message.peer, sends, tag);
      const Post::Letter letter = queue.front();
      queue.pop_front();
      BM_CHECK(letter.bytes == message.bytes, "rank {}: {}: rank {} sent {} bytes, {} were expected", rank_,
               what, message.peer, letter.bytes, message.bytes);
      std::memcpy(message.data, letter.data, letter.bytes);
      --*letter.waiting;
      post_->changed.notify_all();
    }
    if (post_->changed.wait_until(lock, deadline, [&] { return waiting == 0; })) return;
    for (const Message& message : sends) {
      if (!post_->letters[{rank_, message.peer, tag}].empty()) give_up(what, message.peer, sends, tag);
    }
  }

 private:
  // Takes back what nobody has fetched: it points into this thread's memory.
  [[noreturn]] void give_up(std::string_view what, int peer, std::span<const Message> sends, int tag) {
    for (const Message& message : sends) post_->letters[{rank_, message.peer, tag}].clear();
    throw failure("rank {}: {} did not complete within {:.3g} s: waiting for rank {}", rank_, what,
                  timeout_s_, peer);
  }

  std::shared_ptr<Post> post_;
  int rank_, size_;
  double timeout_s_;
};

}  // namespace

std::vector<std::shared_ptr<Transport>> local_transports(int size, double timeout_s) {
  auto post = std::make_shared<Post>();
  std::vector<std::shared_ptr<Transport>> transports;
  for (int rank = 0; rank < size; ++rank)
    transports.push_back(std::make_shared<LocalTransport>(post, rank, size, timeout_s));
  return transports;
}

std::unique_ptr<Comm> single_comm() {
  return std::make_unique<GroupComm>(local_transports(1, 1).front());
}

}  // namespace biomoe
