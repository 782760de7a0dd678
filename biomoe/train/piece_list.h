// A list of pieces of work that one thread does beside products, and all threads where it must be through.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "biomoe/core/context.h"
#include "biomoe/ops/adamw.h"

namespace biomoe {

// Pieces are done in the order in which they were added, those that are open. What a piece computes must not
// depend on the number of threads. Only one thread may call anything at a time.
class PieceList : public SideWork {
 public:
  struct Piece {
    int64_t stage = 0;
    size_t segment = 0;
    ArenaSegment part{};
  };
  using Body = std::function<void(Context&, const Piece&)>;
  explicit PieceList(Body body) : body_(std::move(body)) { alone_.num_threads = 1; }

  void add(const Piece& piece) { pieces_.push_back(piece); }
  bool empty() const { return pieces_.empty(); }
  bool done() const { return next_ == pieces_.size(); }

  // All pieces are to be done anew; none is open.
  void restart() { next_ = open_ = 0; }
  // The pieces from the first that is not open to the last of that stage are. Allocates nothing, as the next.
  void open_stage(int64_t stage) {
    while (open_ < pieces_.size() && pieces_[open_].stage == stage) ++open_;
  }
  void open_all() { open_ = pieces_.size(); }
  bool do_piece() override {
    if (next_ >= open_) return false;
    body_(alone_, pieces_[next_++]);
    return true;
  }
  // Does what is left of the open pieces before the first of a stage after `last_stage`.
  void finish(Context& ctx, int64_t last_stage) {
    for (; next_ < open_ && pieces_[next_].stage <= last_stage; ++next_) body_(ctx, pieces_[next_]);
  }

 private:
  Body body_;
  Context alone_;  // one thread of the CPU
  std::vector<Piece> pieces_;
  size_t next_ = 0, open_ = 0;
};

}  // namespace biomoe
