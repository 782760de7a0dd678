// FolderLock: one run at a time in a folder.
#pragma once

#include <filesystem>

#include "biomoe/core/descriptor.h"

namespace biomoe {

// An advisory lock (flock) on the folder itself: it leaves no file behind, and a process that dies lets go of
// it.
class FolderLock {
 public:
  // Takes the lock when the folder exists and this object does not hold one yet. Throws user_error when
  // another process holds it. File systems that know no locks are let through.
  void take(const std::filesystem::path& folder);

 private:
  Descriptor descriptor_;
};

}  // namespace biomoe
