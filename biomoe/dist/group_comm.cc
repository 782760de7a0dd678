#include "biomoe/dist/group_comm.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <tuple>

namespace biomoe {
namespace {

// Of one rank in a reduction: large enough that a message costs little beside its bytes, small enough to stay
// in the caches of the rank that adds it up; all ranks' together are bounded.
constexpr size_t kPieceBytes = size_t{256} << 10;
constexpr size_t kAllPiecesBytes = size_t{16} << 20;
constexpr size_t kSmallestPiece = size_t{4} << 10;

template <typename T>
void combine(ReduceOp op, const void* from, void* into, int64_t count) {
  const auto* x = static_cast<const T*>(from);
  auto* y = static_cast<T*>(into);
  if (op == ReduceOp::kSum) {
    for (int64_t i = 0; i < count; ++i) y[i] += x[i];
  } else {
    for (int64_t i = 0; i < count; ++i) y[i] = std::max(y[i], x[i]);
  }
}

void combine(ReduceOp op, DType dtype, const void* from, void* into, int64_t count) {
  switch (dtype) {
    case DType::kF32:
      return combine<float>(op, from, into, count);
    case DType::kF64:
      return combine<double>(op, from, into, count);
    case DType::kI64:
      return combine<int64_t>(op, from, into, count);
    default:
      throw failure("{} is not reduced over ranks on the host", dtype_name(dtype));
  }
}

unsigned char* bytes_at(const TensorView& x, int64_t element) {
  return static_cast<unsigned char*>(x.data) + static_cast<size_t>(element) * dtype_size(x.dtype);
}

void check_host(const Context& ctx, std::string_view what, const TensorView& x) {
  BM_CHECK(ctx.device == Device::kCpu, "{}: ranks on a device cannot talk through the host", what);
  BM_CHECK(x.contiguous(), "{}: not contiguous", what);
}

void check_parts(std::string_view what, const TensorView& part, const TensorView& whole, int ranks) {
  BM_CHECK(part.dtype == whole.dtype && part.num_elements() * ranks == whole.num_elements(),
           "{}: {} elements of {} for {} ranks with {} of {}", what, whole.num_elements(),
           dtype_name(whole.dtype), ranks, part.num_elements(), dtype_name(part.dtype));
}

}  // namespace

GroupComm::GroupComm(std::shared_ptr<Transport> transport)
    : GroupComm(
          transport,
          [&] {
            std::vector<int> all(static_cast<size_t>(transport->size()));
            std::iota(all.begin(), all.end(), 0);
            return all;
          }(),
          0) {}

GroupComm::GroupComm(std::shared_ptr<Transport> transport, std::vector<int> ranks, int tag)
    : transport_(std::move(transport)), ranks_(std::move(ranks)), tag_(tag) {
  const auto self = std::find(ranks_.begin(), ranks_.end(), transport_->rank());
  BM_CHECK(self != ranks_.end(), "rank {} is not of its own group", transport_->rank());
  rank_ = static_cast<int>(self - ranks_.begin());
  if (ranks_.size() == 1) return;
  pieces_.resize(planned_bytes(size()));
  piece_bytes_ = pieces_.size() / ranks_.size();
  sends_.reserve(ranks_.size());
  receives_.reserve(ranks_.size());
}

size_t GroupComm::planned_bytes(int64_t ranks) {
  const auto count = static_cast<size_t>(ranks);
  if (count == 1) return 0;
  return count * std::clamp(kAllPiecesBytes / count / 64 * 64, kSmallestPiece, kPieceBytes);
}

// Peers are ranks of this group up to here.
void GroupComm::exchange(std::string_view what) {
  for (std::vector<Message>* list : {&sends_, &receives_}) {
    std::erase_if(*list, [](const Message& message) { return message.bytes == 0; });
    for (Message& message : *list) message.peer = ranks_[static_cast<size_t>(message.peer)];
  }
  transport_->exchange(sends_, receives_, tag_, what);
  sends_.clear();
  receives_.clear();
}

// receive (part rank_) = reduced parts of all.
void GroupComm::reduce_parts(const TensorView& send, const TensorView& receive, ReduceOp op,
                             std::string_view what) {
  const int64_t part = receive.num_elements();
  const size_t element = dtype_size(send.dtype);
  const auto step = static_cast<int64_t>(piece_bytes_ / element);
  const auto piece = [&](int rank) { return pieces_.data() + static_cast<size_t>(rank) * piece_bytes_; };
  for (int64_t begin = 0; begin < part; begin += step) {
    const int64_t count = std::min(step, part - begin);
    const size_t bytes = static_cast<size_t>(count) * element;
    for (int peer = 0; peer < size(); ++peer) {
      if (peer == rank_) continue;
      sends_.push_back({peer, bytes_at(send, peer * part + begin), bytes});
      receives_.push_back({peer, piece(peer), bytes});
    }
    exchange(what);
    std::memcpy(piece(rank_), bytes_at(send, rank_ * part + begin), bytes);
    for (int peer = 1; peer < size(); ++peer) combine(op, send.dtype, piece(peer), piece(0), count);
    std::memcpy(bytes_at(receive, begin), piece(0), bytes);
  }
}

void GroupComm::gather_parts(const TensorView& send, const TensorView& receive, std::string_view what) {
  const int64_t part = send.num_elements();
  unsigned char* own = bytes_at(receive, rank_ * part);
  if (own != send.data && part > 0) std::memcpy(own, send.data, send.bytes());
  if (size() == 1) return;
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank_) continue;
    sends_.push_back({peer, own, send.bytes()});
    receives_.push_back({peer, bytes_at(receive, peer * part), send.bytes()});
  }
  exchange(what);
}

// In one exchange: everybody adds up everything.
void GroupComm::reduce_small(const TensorView& x, ReduceOp op, std::string_view what) {
  const auto piece = [&](int rank) { return pieces_.data() + static_cast<size_t>(rank) * piece_bytes_; };
  for (int peer = 0; peer < size(); ++peer) {
    if (peer == rank_) continue;
    sends_.push_back({peer, x.data, x.bytes()});
    receives_.push_back({peer, piece(peer), x.bytes()});
  }
  exchange(what);
  std::memcpy(piece(rank_), x.data, x.bytes());
  for (int peer = 1; peer < size(); ++peer) combine(op, x.dtype, piece(peer), piece(0), x.num_elements());
  std::memcpy(x.data, piece(0), x.bytes());
}

void GroupComm::all_reduce(Context& ctx, const TensorView& x, ReduceOp op, std::string_view what) {
  check_host(ctx, what, x);
  if (size() == 1 || x.num_elements() == 0) return;
  if (x.bytes() <= kSmallestPiece) return reduce_small(x, op, what);
  // The parts of equal size, then what is left over.
  const int64_t part = x.num_elements() / size(), whole = part * size();
  const TensorView parts(x.data, x.dtype, Shape{whole});
  const TensorView own(bytes_at(x, rank_ * part), x.dtype, Shape{part});
  reduce_parts(parts, own, op, what);
  gather_parts(own, parts, what);
  if (whole == x.num_elements()) return;
  reduce_small(TensorView(bytes_at(x, whole), x.dtype, Shape{x.num_elements() - whole}), op, what);
}

void GroupComm::all_gather(Context& ctx, const TensorView& send, const TensorView& receive,
                           std::string_view what) {
  check_host(ctx, what, send);
  check_host(ctx, what, receive);
  check_parts(what, send, receive, size());
  gather_parts(send, receive, what);
}

void GroupComm::reduce_scatter(Context& ctx, const TensorView& send, const TensorView& receive, ReduceOp op,
                               std::string_view what) {
  check_host(ctx, what, send);
  check_host(ctx, what, receive);
  check_parts(what, receive, send, size());
  if (size() > 1) {
    reduce_parts(send, receive, op, what);
  } else if (receive.data != send.data && send.num_elements() > 0) {
    std::memcpy(receive.data, send.data, send.bytes());
  }
}

void GroupComm::all_to_all_v(Context& ctx, const AllToAllV& args, std::string_view what) {
  check_host(ctx, what, args.send);
  check_host(ctx, what, args.receive);
  const size_t row = static_cast<size_t>(args.send.row_elements()) * dtype_size(args.send.dtype);
  BM_CHECK(args.send.dtype == args.receive.dtype && args.send.row_elements() == args.receive.row_elements(),
           "{}: rows of {} and of {}", what, args.send.shape.str(), args.receive.shape.str());
  const auto add = [&](const TensorView& rows, std::span<const RowSegment> segments,
                       std::vector<Message>& messages) {
    for (const RowSegment& segment : segments) {
      BM_CHECK(segment.peer >= 0 && segment.peer < size() && segment.begin >= 0 && segment.count >= 0 &&
                   segment.begin + segment.count <= rows.shape[0],
               "{}: rows [{}, {}) of {} for rank {} of {}", what, segment.begin,
               segment.begin + segment.count, rows.shape[0], segment.peer, size());
      messages.push_back({static_cast<int>(segment.peer),
                          static_cast<unsigned char*>(rows.data) + static_cast<size_t>(segment.begin) * row,
                          static_cast<size_t>(segment.count) * row});
    }
  };
  add(args.send, args.send_segments, sends_);
  add(args.receive, args.receive_segments, receives_);
  // What stays here is copied.
  auto from = sends_.begin();
  for (const Message& to : receives_) {
    if (to.peer != rank_ || to.bytes == 0) continue;
    while (from != sends_.end() && (from->peer != rank_ || from->bytes == 0)) ++from;
    BM_CHECK(from != sends_.end() && from->bytes == to.bytes, "{}: rank {} does not send itself {} bytes",
             what, rank_, to.bytes);
    std::memcpy(to.data, from->data, to.bytes);
    ++from;
  }
  for (std::vector<Message>* list : {&sends_, &receives_})
    std::erase_if(*list, [this](const Message& message) { return message.peer == rank_; });
  exchange(what);
}

void GroupComm::broadcast(Context& ctx, const TensorView& x, int root, std::string_view what) {
  check_host(ctx, what, x);
  BM_CHECK(root >= 0 && root < size(), "{}: from rank {} of {}", what, root, size());
  if (rank_ != root) receives_.push_back({root, x.data, x.bytes()});
  for (int peer = 0; rank_ == root && peer < size(); ++peer) {
    if (peer != root) sends_.push_back({peer, x.data, x.bytes()});
  }
  exchange(what);
}

void GroupComm::barrier(std::string_view what) {
  all_reduce_value(*this, int64_t{0}, ReduceOp::kMax, what);
}

std::unique_ptr<Comm> GroupComm::split(int64_t colour, int64_t key) {
  struct Member {
    int64_t colour, key, rank;
  };
  std::vector<Member> members(ranks_.size());
  members[static_cast<size_t>(rank_)] = {colour, key, rank_};
  constexpr int64_t kFields = 3;
  gather_parts(TensorView(&members[static_cast<size_t>(rank_)], DType::kI64, Shape{kFields}),
               TensorView(members.data(), DType::kI64, Shape{kFields * size()}), "a split of ranks");
  // Groups of one split share no rank, so they can share a tag; the next split needs another, unknown to all
  // of its members.
  const int64_t next =
      all_reduce_value(*this, int64_t{transport_->next_tag()}, ReduceOp::kMax, "a split of ranks");
  transport_->set_next_tag(static_cast<int>(next) + 1);
  std::erase_if(members, [&](const Member& member) { return member.colour != colour; });
  std::sort(members.begin(), members.end(), [](const Member& a, const Member& b) {
    return std::tie(a.key, a.rank) < std::tie(b.key, b.rank);
  });
  std::vector<int> ranks;
  for (const Member& member : members) ranks.push_back(ranks_[static_cast<size_t>(member.rank)]);
  return std::unique_ptr<Comm>(new GroupComm(transport_, std::move(ranks), static_cast<int>(next)));
}

int64_t all_reduce_value(Comm& comm, int64_t value, ReduceOp op, std::string_view what) {
  Context host;
  comm.all_reduce(host, TensorView(&value, DType::kI64, Shape{1}), op, what);
  return value;
}

double all_reduce_value(Comm& comm, double value, ReduceOp op, std::string_view what) {
  Context host;
  comm.all_reduce(host, TensorView(&value, DType::kF64, Shape{1}), op, what);
  return value;
}

std::string broadcast_text(Comm& comm, const std::string& text, int root, std::string_view what) {
  Context host;
  auto bytes = static_cast<int64_t>(text.size());
  comm.broadcast(host, TensorView(&bytes, DType::kI64, Shape{1}), root, what);
  std::string copy = comm.rank() == root ? text : std::string(static_cast<size_t>(bytes), '\0');
  comm.broadcast(host, TensorView(copy.data(), DType::kU8, Shape{bytes}), root, what);
  return copy;
}

std::vector<std::string> all_gather_text(Comm& comm, const std::string& text, std::string_view what) {
  std::vector<std::string> texts;
  for (int root = 0; root < comm.size(); ++root) texts.push_back(broadcast_text(comm, text, root, what));
  return texts;
}

}  // namespace biomoe
