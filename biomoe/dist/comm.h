// Comm: a group of ranks and what they do together.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "biomoe/core/context.h"
#include "biomoe/core/tensor_view.h"

namespace biomoe {

enum class ReduceOp : uint8_t { kSum, kMax };

// Rows [begin, begin + count) of a tensor that go to, or come from, `peer`.
struct RowSegment {
  int64_t peer = 0;
  int64_t begin = 0;
  int64_t count = 0;
};

// What rank a sends to rank b and what b receives from a are the same rows in the same order of segments:
// the segments themselves may be cut differently only where both sides agree on each one's count. Segments
// whose peer is the rank itself are copied. The two tensors have rows of the same size and do not overlap.
struct AllToAllV {
  TensorView send;     // read
  TensorView receive;  // assigned in the rows that the segments name, untouched elsewhere
  std::span<const RowSegment> send_segments;
  std::span<const RowSegment> receive_segments;
};

// All ranks of the group make the same calls in the same order with tensors of the same type and size (but
// for all_to_all_v). Tensors are contiguous and in the memory of ctx.device. `what` names the data in the
// message of a call that is not completed in time: then the process ends (see Transport). Sums are made in
// the order of ranks, whatever the transport, so that all ranks hold the same bits and a run repeats itself.
class Comm {
 public:
  virtual ~Comm() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // x = sum or maximum over the ranks, in place: f32, f64 or i64.
  virtual void all_reduce(Context& ctx, const TensorView& x, ReduceOp op, std::string_view what) = 0;
  // receive = the ranks' `send` one after the other; `send` may be this rank's part of `receive`.
  virtual void all_gather(Context& ctx, const TensorView& send, const TensorView& receive,
                          std::string_view what) = 0;
  // receive = part number rank() of the ranks' `send`, reduced; it may be that part of `send`.
  virtual void reduce_scatter(Context& ctx, const TensorView& send, const TensorView& receive, ReduceOp op,
                              std::string_view what) = 0;
  virtual void all_to_all_v(Context& ctx, const AllToAllV& args, std::string_view what) = 0;
  virtual void broadcast(Context& ctx, const TensorView& x, int root, std::string_view what) = 0;
  virtual void barrier(std::string_view what) = 0;

  // The ranks of this group that give the same colour, in the order of (key, rank here).
  virtual std::unique_ptr<Comm> split(int64_t colour, int64_t key) = 0;

  // The same ranks again, for calls on a device beside this group's, which then do not wait for each other;
  // null where all calls are made one after the other anyway.
  virtual std::unique_ptr<Comm> twin() { return nullptr; }
};

// The sum or maximum of a number of the host, on all ranks.
int64_t all_reduce_value(Comm& comm, int64_t value, ReduceOp op, std::string_view what);
double all_reduce_value(Comm& comm, double value, ReduceOp op, std::string_view what);

// The root's text on all ranks.
std::string broadcast_text(Comm& comm, const std::string& text, int root, std::string_view what);
// Every rank's text, by rank.
std::vector<std::string> all_gather_text(Comm& comm, const std::string& text, std::string_view what);

}  // namespace biomoe
