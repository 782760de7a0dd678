// LineScanner: cuts a byte stream into lines without holding a whole line, so that a line may be of any
// length.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "biomoe/data/byte_source.h"

namespace biomoe {

// A line, or a part of one. `text` has no line end and is valid until the next call. A piece that starts a
// line is empty only when the line is.
struct LinePiece {
  std::string_view text;
  bool starts_line = false;
  bool ends_line = false;
};

// LF, CR LF and a lone CR each end a line; the last line need not have an end. A UTF-8 byte-order mark at the
// start of the stream is skipped.
class LineScanner {
 public:
  explicit LineScanner(ByteSource& source, size_t buffer_bytes = size_t{1} << 18);
  bool next(LinePiece& piece);            // false at the end of the stream
  int64_t line() const { return line_; }  // number of the line of the last piece, from 1

 private:
  bool fill();

  ByteSource& source_;
  std::vector<char> buffer_;
  size_t begin_ = 0;
  size_t end_ = 0;
  int64_t line_ = 0;
  bool at_start_ = true;
  bool mid_line_ = false;
  bool skip_line_feed_ = false;  // the last line ended with CR: an LF right after it belongs to the same end
};

}  // namespace biomoe
