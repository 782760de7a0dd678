#include "biomoe/core/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "biomoe/core/descriptor.h"
#include "biomoe/core/error.h"

namespace biomoe {
std::string read_file(const std::filesystem::path& path, uint64_t max_bytes) {
  const Descriptor file = open_regular_file(path);
  struct stat info {};
  if (fstat(file.get(), &info) != 0)
    throw user_error("{}: cannot read: {}", path.string(), std::strerror(errno));
  const auto size = static_cast<uint64_t>(info.st_size);
  if (size > max_bytes)
    throw user_error("{}: {} bytes, more than the {} expected here", path.string(), size, max_bytes);
  std::string bytes(size, '\0');
  uint64_t done = 0;
  while (done < size) {
    const ssize_t got = read(file.get(), bytes.data() + done, size - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw user_error("{}: cannot read: {}", path.string(), std::strerror(errno));
    if (got == 0) break;
    done += static_cast<uint64_t>(got);
  }
  bytes.resize(done);
  return bytes;
}

void write_file_synced(const std::filesystem::path& path, std::string_view bytes) {
  Descriptor file(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!file) throw failure("{}: cannot create: {}", path.string(), std::strerror(errno));
  if (!write_all(file.get(), bytes)) {
    throw failure("{}: cannot write: {}", path.string(), std::strerror(errno));
  }
  if (fsync(file.get()) != 0) throw failure("{}: cannot fsync: {}", path.string(), std::strerror(errno));
  if (file.close_now() != 0) throw failure("{}: cannot close: {}", path.string(), std::strerror(errno));
}

void replace_file(const std::filesystem::path& path, std::string_view bytes) {
  std::filesystem::path temporary = path;
  temporary += ".tmp";
  write_file_synced(temporary, bytes);
  if (rename(temporary.c_str(), path.c_str()) != 0) {
    throw failure("{}: cannot rename into place: {}", path.string(), std::strerror(errno));
  }
  sync_folder(path.has_parent_path() ? path.parent_path() : std::filesystem::path("."));
}

void require_creatable(const std::filesystem::path& path) {
  const std::filesystem::path folder = path.has_parent_path() ? path.parent_path() : ".";
  struct stat info {};
  if (stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode)) {
    throw user_error("{}: a folder, where a file is to be written", path.string());
  }
  if (stat(folder.c_str(), &info) != 0 || access(folder.c_str(), W_OK | X_OK) != 0) {
    throw user_error("{}: cannot be written: {}", path.string(), std::strerror(errno));
  }
  if (!S_ISDIR(info.st_mode)) throw user_error("{}: {} is not a folder", path.string(), folder.string());
}

void sync_folder(const std::filesystem::path& folder) {
  const Descriptor directory(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!directory || fsync(directory.get()) != 0) {
    throw failure("{}: cannot fsync the folder: {}", folder.string(), std::strerror(errno));
  }
}

}  // namespace biomoe
