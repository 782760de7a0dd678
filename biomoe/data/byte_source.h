// ByteSource: the decompressed bytes of a file or of memory, as a forward-only stream.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace biomoe {

class ByteSource {
 public:
  virtual ~ByteSource() = default;
  // Puts up to `capacity` bytes at `out` and returns how many; 0 only at the end of the stream. Throws
  // user_error naming the source when the data are damaged, truncated or unreadable, and at the end when a
  // file has changed since it was opened.
  virtual size_t read(char* out, size_t capacity) = 0;
  const std::string& name() const { return name_; }  // the path, for messages

 protected:
  explicit ByteSource(std::string name) : name_(std::move(name)) {}

 private:
  std::string name_;
};

// Opens `path` (a file or a pipe) and decompresses by content: gzip with any number of members, BGZF, zstd,
// or none. A name that ends in .gz, .bgz or .zst promises that compression. Throws user_error: missing,
// unreadable, a directory, empty, not what its name promises, a BGZF file without its end marker.
std::unique_ptr<ByteSource> open_byte_source(const std::string& path);

// `bytes` is not copied and must outlive the source.
std::unique_ptr<ByteSource> memory_byte_source(std::string_view bytes, std::string name);

}  // namespace biomoe
