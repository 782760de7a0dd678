// An owned file descriptor; opening and listing of what a user names.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace biomoe {

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() { close_now(); }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int close_now();  // the result of close(2), 0 when nothing is open

 private:
  int fd_ = -1;
};

// For reading. user_error when the path is missing, unreadable, or not a regular file (a named pipe does not
// block).
Descriptor open_regular_file(const std::filesystem::path& path);

// For writing after what is there, or made. user_error when it cannot be, and for what is no regular file: a
// link is not followed and a pipe does not block.
Descriptor open_to_append(const std::filesystem::path& path);

// Writes all of `bytes`; false when the system refuses, with errno saying why.
bool write_all(int fd, std::string_view bytes);

// Names of the entries of a folder, sorted. user_error when it cannot be listed.
std::vector<std::string> folder_names(const std::filesystem::path& folder);

}  // namespace biomoe
