// checksums.json of a training checkpoint: {"algorithm": "crc32", "files": {name: {"bytes", "crc32"}}}, for
// every other file of the folder. Written last: a folder that has it has everything.
#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "biomoe/checkpoint/checksum.h"
#include "biomoe/checkpoint/training_checkpoint.h"

namespace biomoe {

struct CheckpointManifest {
  std::map<std::string, FileDigest> files;

  FileDigest write(const std::filesystem::path& folder) const;
  // user_error when it is missing or of another form, or names something that is not a file of the folder.
  static CheckpointManifest read(const std::filesystem::path& folder);
  // Problems, one line each: files that are missing or of another size. Reads no contents. Files that the
  // manifest does not name (.DS_Store, somebody's notes) are nothing to it.
  std::vector<std::string> check_sizes(const std::filesystem::path& folder) const;
  // The same, and every checksum.
  VerifyResult verify(const std::filesystem::path& folder) const;
};

}  // namespace biomoe
