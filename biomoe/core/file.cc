#include "biomoe/core/file.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "biomoe/core/descriptor.h"
#include "biomoe/core/error.h"

namespace biomoe {
namespace {

namespace fs = std::filesystem;

constexpr int kMaxAttempts = 1000;  // at a name that nothing has

fs::path folder_of(const fs::path& path) {
  return path.has_parent_path() ? path.parent_path() : fs::path(".");
}

// Devices, pipes and links: a rename would put a file in their place.
bool is_other_than_regular(const fs::path& path) {
  std::error_code ignored;
  const fs::file_status status = fs::symlink_status(path, ignored);
  return fs::exists(status) && !fs::is_regular_file(status) && !fs::is_directory(status);
}

void write_and_close(Descriptor file, const fs::path& path, std::string_view bytes) {
  if (!write_all(file.get(), bytes))
    throw failure("{}: cannot write: {}", path.string(), std::strerror(errno));
  // Pipes and devices know no fsync (EINVAL, EROFS).
  if (fsync(file.get()) != 0 && errno != EINVAL && errno != EROFS)
    throw failure("{}: cannot fsync: {}", path.string(), std::strerror(errno));
  if (file.close_now() != 0) throw failure("{}: cannot close: {}", path.string(), std::strerror(errno));
}

}  // namespace

std::string read_file(const fs::path& path, uint64_t max_bytes) {
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
    if (got == 0)
      throw user_error("{}: became shorter while it was read; read it when it is whole", path.string());
    done += static_cast<uint64_t>(got);
  }
  return bytes;
}

void write_file_synced(const fs::path& path, std::string_view bytes) {
  Descriptor file(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!file) throw failure("{}: cannot create: {}", path.string(), std::strerror(errno));
  write_and_close(std::move(file), path, bytes);
}

namespace {

// Temporaries of writes of `path` that died: their owners hold a lock on them, which ends with the process.
void remove_dead_temporaries(const fs::path& folder, const std::string& prefix) {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    if (!entry.path().filename().string().starts_with(prefix)) continue;
    const Descriptor file(open(entry.path().c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
    if (file && flock(file.get(), LOCK_EX | LOCK_NB) == 0) unlink(entry.path().c_str());
  }
}

// Whether the temporary is ours now: locked, and not taken for a dead one before it was.
bool lock_temporary(const Descriptor& file) {
  struct stat info {};
  if (flock(file.get(), LOCK_EX | LOCK_NB) != 0 && errno != ENOTSUP && errno != ENOSYS) return false;
  return fstat(file.get(), &info) == 0 && info.st_nlink > 0;
}

}  // namespace

void write_output(const fs::path& path, std::string_view bytes) {
  if (is_other_than_regular(path)) return write_file_synced(path, bytes);
  replace_file(path, bytes);
}

void replace_file(const fs::path& path, std::string_view bytes) {
  const fs::path folder = folder_of(path);
  const std::string prefix = fmt::format(".{}.tmp-", path.filename().string());
  remove_dead_temporaries(folder, prefix);
  fs::path temporary;
  Descriptor file;
  for (int attempt = 0; !file; ++attempt) {
    temporary = folder / fmt::format("{}{}-{}", prefix, getpid(), attempt);
    file = Descriptor(open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
    if (!file && (errno != EEXIST || attempt == kMaxAttempts))
      throw failure("{}: cannot create beside it: {}", path.string(), std::strerror(errno));
    if (file && attempt < kMaxAttempts && !lock_temporary(file)) file = Descriptor();
  }
  const Descriptor held(dup(file.get()));  // keeps the lock until the temporary has its name
  try {
    write_and_close(std::move(file), path, bytes);
    if (rename(temporary.c_str(), path.c_str()) != 0)
      throw failure("{}: cannot rename into place: {}", path.string(), std::strerror(errno));
  } catch (const Error&) {
    unlink(temporary.c_str());
    throw;
  }
  sync_folder(folder);
}

void require_creatable(const fs::path& path) {
  const fs::path folder = folder_of(path);
  struct stat info {};
  if (stat(path.c_str(), &info) == 0) {
    if (S_ISDIR(info.st_mode)) throw user_error("{}: a folder, where a file is to be written", path.string());
    if (is_other_than_regular(path)) {
      if (access(path.c_str(), W_OK) == 0) return;
      throw user_error("{}: cannot be written: {}", path.string(), std::strerror(errno));
    }
  }
  if (stat(folder.c_str(), &info) != 0 || access(folder.c_str(), W_OK | X_OK) != 0) {
    throw user_error("{}: cannot be written: {}", path.string(), std::strerror(errno));
  }
  if (!S_ISDIR(info.st_mode)) throw user_error("{}: {} is not a folder", path.string(), folder.string());
}

void require_not_an_input(const fs::path& output, const std::vector<std::string>& inputs) {
  std::error_code ignored;
  for (const std::string& input : inputs) {
    if (fs::equivalent(output, input, ignored))
      throw user_error(
          "{}: an input of this command, which writing the output would destroy; name another file",
          output.string());
  }
}

void sync_folder(const fs::path& folder) {
  const Descriptor directory(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!directory || fsync(directory.get()) != 0) {
    throw failure("{}: cannot fsync the folder: {}", folder.string(), std::strerror(errno));
  }
}

}  // namespace biomoe
