#include "biomoe/core/descriptor.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "biomoe/core/error.h"

namespace biomoe {

int Descriptor::close_now() {
  if (fd_ < 0) return 0;
  return close(std::exchange(fd_, -1));
}

Descriptor open_regular_file(const std::filesystem::path& path) {
  Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file) throw user_error("{}: cannot open: {}", path.string(), std::strerror(errno));
  struct stat info {};
  if (fstat(file.get(), &info) != 0 || !S_ISREG(info.st_mode)) {
    throw user_error("{}: not a regular file", path.string());
  }
  return file;
}

Descriptor open_to_append(const std::filesystem::path& path) {
  constexpr int kFlags = O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
  Descriptor file(open(path.c_str(), kFlags, 0644));
  struct stat info {};
  const int reason = errno;
  if (!file && reason != ELOOP && reason != ENXIO)
    throw user_error("{}: cannot open for writing: {}", path.string(), std::strerror(reason));
  if (!file || fstat(file.get(), &info) != 0 || !S_ISREG(info.st_mode))
    throw user_error("{}: not a regular file, to which a run could add lines; remove it", path.string());
  return file;
}

bool write_all(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t put = write(fd, bytes.data(), bytes.size());
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return false;
    bytes.remove_prefix(static_cast<size_t>(put));
  }
  return true;
}

std::vector<std::string> folder_names(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  std::filesystem::directory_iterator entry(folder, error);
  for (const std::filesystem::directory_iterator end; !error && entry != end; entry.increment(error)) {
    names.push_back(entry->path().filename().string());
  }
  if (error) throw user_error("{}: cannot list the folder: {}", folder.string(), error.message());
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace biomoe
