#include "biomoe/train/folder_lock.h"

#include <fcntl.h>
#include <sys/file.h>

#include <cerrno>

#include "biomoe/core/error.h"

namespace biomoe {

void FolderLock::take(const std::filesystem::path& folder) {
  if (descriptor_) return;
  Descriptor opened(open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!opened) return;
  if (flock(opened.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    throw user_error(
        "{}: another run is at work in this folder; wait for it to end, or choose another run_dir",
        folder.string());
  }
  descriptor_ = std::move(opened);
}

}  // namespace biomoe
