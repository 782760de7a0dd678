// Folders that appear whole or not at all.
#pragma once

#include <filesystem>
#include <string_view>

#include "biomoe/core/descriptor.h"

namespace biomoe {

// A hidden folder ".NAME.partial-PID-K" beside its destination, to be filled and then renamed to it. It is
// locked (flock) while the object lives, so that another process can tell a save in progress from the
// leftovers of a dead one: the system drops the lock when a process ends, however it ends. On file systems
// without such locks leftovers stay.
class StagingFolder {
 public:
  // failure when the folder cannot be made.
  explicit StagingFolder(std::filesystem::path destination);
  ~StagingFolder();  // removes the folder unless it was committed
  StagingFolder(const StagingFolder&) = delete;
  StagingFolder& operator=(const StagingFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }

  // The files in it must be fsynced already. Fsyncs the folder, renames it to the destination, fsyncs the
  // parent. A folder that stands there is exchanged in the same instant and then deleted. (File systems that
  // cannot exchange: it is renamed away first, and a crash between the two renames leaves it under its hidden
  // name.)
  void commit();

 private:
  std::filesystem::path destination_;
  std::filesystem::path path_;
  Descriptor lock_;
  bool committed_ = false;
};

// Deletes a folder so that a crash leaves it either whole under its name or hidden under
// ".NAME.deleted-PID-K", which remove_leftovers collects. failure when it cannot be renamed.
void remove_folder(const std::filesystem::path& folder);

// Removes hidden folders ".PREFIX*.partial-PID-K" of saves that are dead and ".PREFIX*.deleted-PID-K" of
// deletions that were cut short, in `parent`. What a living process holds, and what cannot be told, is left,
// with no error. user_error when `parent` cannot be listed.
void remove_leftovers(const std::filesystem::path& parent, std::string_view prefix);

}  // namespace biomoe
