// GroupComm: collective operations between host tensors, made of the messages of a Transport.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "biomoe/dist/comm.h"
#include "biomoe/dist/transport.h"

namespace biomoe {

// Every rank talks to every other directly: n - 1 messages of a part each way, in pieces that fit memory set
// aside at the start. A rank that does not answer is therefore named by all who wait for it.
class GroupComm : public Comm {
 public:
  // All ranks of the transport.
  explicit GroupComm(std::shared_ptr<Transport> transport);
  static size_t planned_bytes(int64_t ranks);  // what a group of so many sets aside

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(ranks_.size()); }
  void all_reduce(Context& ctx, const TensorView& x, ReduceOp op, std::string_view what) override;
  void all_gather(Context& ctx, const TensorView& send, const TensorView& receive,
                  std::string_view what) override;
  void reduce_scatter(Context& ctx, const TensorView& send, const TensorView& receive, ReduceOp op,
                      std::string_view what) override;
  void all_to_all_v(Context& ctx, const AllToAllV& args, std::string_view what) override;
  void broadcast(Context& ctx, const TensorView& x, int root, std::string_view what) override;
  void barrier(std::string_view what) override;
  std::unique_ptr<Comm> split(int64_t colour, int64_t key) override;

 private:
  GroupComm(std::shared_ptr<Transport> transport, std::vector<int> ranks, int tag);
  void reduce_parts(const TensorView& send, const TensorView& receive, ReduceOp op, std::string_view what);
  void gather_parts(const TensorView& send, const TensorView& receive, std::string_view what);
  void reduce_small(const TensorView& x, ReduceOp op, std::string_view what);
  void exchange(std::string_view what);

  std::shared_ptr<Transport> transport_;
  std::vector<int> ranks_;  // of the transport, by rank of this group
  int rank_ = 0;
  int tag_ = 0;  // no other group of these ranks has it
  size_t piece_bytes_ = 0;
  std::vector<unsigned char> pieces_;  // one of each rank
  std::vector<Message> sends_, receives_;
};

}  // namespace biomoe
