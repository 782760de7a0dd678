#include "biomoe/checkpoint/staging_folder.h"

#include <fcntl.h>
#include <stdio.h>  // renameat2
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "biomoe/core/error.h"
#include "biomoe/core/file.h"

namespace biomoe {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPartial = ".partial-";
constexpr std::string_view kDeleted = ".deleted-";

fs::path parent_of(const fs::path& path) {
  return path.has_parent_path() ? path.parent_path() : fs::path(".");
}

std::string hidden_name(const fs::path& folder, std::string_view mark, int attempt) {
  return fmt::format(".{}{}{}-{}", folder.filename().string(), mark, getpid(), attempt);
}

bool same_inode(int fd, const fs::path& path) {
  struct stat open_one {
  }, named{};
  return fstat(fd, &open_one) == 0 && lstat(path.c_str(), &named) == 0 && open_one.st_ino == named.st_ino &&
         open_one.st_dev == named.st_dev;
}

// Renames `folder` to a hidden name beside it that nothing has, and returns that name.
fs::path hide(const fs::path& folder) {
  for (int attempt = 0; attempt < 1000; ++attempt) {
    fs::path hidden = parent_of(folder) / hidden_name(folder, kDeleted, attempt);
    // rename(2) would replace an empty folder of that name, which is what is wanted, and refuses any other.
    if (rename(folder.c_str(), hidden.c_str()) == 0) return hidden;
    if (errno != ENOTEMPTY && errno != EEXIST) break;
  }
  throw failure("{}: cannot rename away: {}", folder.string(), std::strerror(errno));
}

// ".PREFIX*MARKdigits-digits"
bool has_mark(std::string_view name, std::string_view prefix, std::string_view mark) {
  if (name.substr(0, 1) != "." || name.substr(1, prefix.size()) != prefix) return false;
  const size_t at = name.rfind(mark);
  if (at == name.npos) return false;
  const std::string_view rest = name.substr(at + mark.size());
  return !rest.empty() && rest.find_first_not_of("0123456789-") == rest.npos;
}

void remove_if_dead(const fs::path& folder) {
  const Descriptor lock(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  if (!lock || flock(lock.get(), LOCK_EX | LOCK_NB) != 0) return;
  std::error_code ignored;
  fs::remove_all(folder, ignored);
}

}  // namespace

StagingFolder::StagingFolder(fs::path destination) : destination_(std::move(destination)) {
  for (int attempt = 0; attempt < 1000; ++attempt) {
    path_ = parent_of(destination_) / hidden_name(destination_, kPartial, attempt);
    if (mkdir(path_.c_str(), 0755) != 0) {
      if (errno == EEXIST) continue;
      throw failure("{}: cannot create the folder: {}", path_.string(), std::strerror(errno));
    }
    lock_ = Descriptor(open(path_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    // Between mkdir and here another process may have taken the folder for a leftover; then it is gone, and
    // the next name is tried. Where flock is not supported nobody can lock, and nobody removes.
    if (!lock_) continue;
    flock(lock_.get(), LOCK_EX);
    if (same_inode(lock_.get(), path_)) return;
  }
  throw failure("{}: cannot create a temporary folder beside it", destination_.string());
}

StagingFolder::~StagingFolder() {
  if (committed_) return;
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

void StagingFolder::commit() {
  sync_folder(path_);
  const fs::path parent = parent_of(destination_);
  if (rename(path_.c_str(), destination_.c_str()) == 0) {
    committed_ = true;
    sync_folder(parent);
    return;
  }
  if (errno != ENOTEMPTY && errno != EEXIST) {
    throw failure("{}: cannot rename into place: {}", destination_.string(), std::strerror(errno));
  }
  if (renameat2(AT_FDCWD, path_.c_str(), AT_FDCWD, destination_.c_str(), RENAME_EXCHANGE) == 0) {
    committed_ = true;
    sync_folder(parent);
    std::error_code ignored;
    fs::remove_all(path_, ignored);  // what stood there before, under the hidden name now
    return;
  }
  if (errno != EINVAL && errno != ENOSYS) {
    throw failure("{}: cannot replace: {}", destination_.string(), std::strerror(errno));
  }
  const fs::path old = hide(destination_);
  if (rename(path_.c_str(), destination_.c_str()) != 0) {
    const int reason = errno;
    if (rename(old.c_str(), destination_.c_str()) != 0) {
      throw failure("{}: cannot rename into place: {}; what was there is now {}", destination_.string(),
                    std::strerror(reason), old.string());
    }
    throw failure("{}: cannot rename into place: {}", destination_.string(), std::strerror(reason));
  }
  committed_ = true;
  sync_folder(parent);
  std::error_code ignored;
  fs::remove_all(old, ignored);
}

void remove_folder(const fs::path& folder) {
  const fs::path hidden = hide(folder);
  sync_folder(parent_of(folder));
  std::error_code ignored;
  fs::remove_all(hidden, ignored);
}

void remove_leftovers(const fs::path& parent, std::string_view prefix) {
  for (const std::string& name : folder_names(parent)) {
    const fs::path path = parent / name;
    std::error_code ignored;
    if (!fs::is_directory(fs::symlink_status(path, ignored))) continue;
    if (has_mark(name, prefix, kPartial)) remove_if_dead(path);
    if (has_mark(name, prefix, kDeleted)) fs::remove_all(path, ignored);
  }
}

}  // namespace biomoe
