#include "biomoe/data/line_scanner.h"

#include <algorithm>
#include <cstring>

namespace biomoe {
namespace {

constexpr std::string_view kByteOrderMark("\xef\xbb\xbf", 3);

}  // namespace

LineScanner::LineScanner(ByteSource& source, size_t buffer_bytes)
    : source_(source), buffer_(std::max(buffer_bytes, kByteOrderMark.size())) {}

bool LineScanner::fill() {
  begin_ = 0;
  end_ = source_.read(buffer_.data(), buffer_.size());
  if (!at_start_ || end_ == 0) return end_ > 0;
  at_start_ = false;
  while (end_ < kByteOrderMark.size()) {
    const size_t got = source_.read(buffer_.data() + end_, buffer_.size() - end_);
    if (got == 0) break;
    end_ += got;
  }
  if (std::string_view(buffer_.data(), end_).starts_with(kByteOrderMark)) begin_ = kByteOrderMark.size();
  return begin_ < end_ || fill();
}

bool LineScanner::next(LinePiece& piece) {
  while (true) {
    if (begin_ == end_ && !fill()) {
      if (!mid_line_) return false;
      mid_line_ = false;
      piece = {{}, false, true};
      return true;
    }
    if (!skip_line_feed_) break;
    skip_line_feed_ = false;
    if (buffer_[begin_] != '\n') break;
    ++begin_;
  }
  const char* first = buffer_.data() + begin_;
  const char* stop = buffer_.data() + end_;
  const auto* found = static_cast<const char*>(std::memchr(first, '\n', static_cast<size_t>(stop - first)));
  if (found != nullptr) stop = found;
  found = static_cast<const char*>(std::memchr(first, '\r', static_cast<size_t>(stop - first)));
  if (found != nullptr) stop = found;

  piece.text = {first, static_cast<size_t>(stop - first)};
  piece.starts_line = !mid_line_;
  piece.ends_line = stop != buffer_.data() + end_;
  if (piece.starts_line) ++line_;
  mid_line_ = !piece.ends_line;
  skip_line_feed_ = piece.ends_line && *stop == '\r';
  begin_ = static_cast<size_t>(stop - buffer_.data()) + (piece.ends_line ? 1 : 0);
  return true;
}

}  // namespace biomoe
