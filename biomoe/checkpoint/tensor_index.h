// A folder of safetensors as `transformers` lays it out: STEM.safetensors, or shards
// STEM-00001-of-0000N.safetensors with STEM.safetensors.index.json ({"metadata": {"total_size"},
// "weight_map": {tensor: shard}}).
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "biomoe/checkpoint/safetensors.h"
#include "biomoe/checkpoint/safetensors_writer.h"

namespace biomoe {

// Every shard is opened and checked, and the index against them, before the constructor returns. Move-only.
class TensorFolder {
 public:
  // user_error, one line, when: neither file is there, or both; a shard is missing, is not a regular file,
  // has a name with a folder in it or a link that leads out of the folder; a tensor is missing, in another
  // shard than the index says, in two shards, or not in the index; metadata.total_size is not the sum of the
  // tensors; a numbered shard lies beside them that the index does not name; or a file is damaged (see
  // SafetensorsFile).
  explicit TensorFolder(const std::filesystem::path& folder, std::string_view stem = "model");

  struct Place {
    const SafetensorsFile* file = nullptr;
    const SafetensorsEntry* entry = nullptr;
    explicit operator bool() const { return entry != nullptr; }
  };
  const std::map<std::string, Place>& tensors() const { return tensors_; }    // by name
  Place find(const std::string& name) const;                                  // absent when there is none
  const std::vector<std::string>& file_names() const { return file_names_; }  // without the index
  bool sharded() const { return sharded_; }
  uint64_t total_bytes() const { return total_bytes_; }  // of the tensors' data
  int64_t total_elements() const { return total_elements_; }

  // Where the tensors are described, for messages: the index, or the one file.
  const std::string& origin() const { return origin_; }

 private:
  void open_single(const std::filesystem::path& folder, const std::string& file);
  void open_shards(const std::filesystem::path& folder, const std::filesystem::path& index);
  void add_file(const std::filesystem::path& folder, const std::string& file);

  std::string origin_;
  bool sharded_ = false;
  std::vector<std::string> file_names_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, Place> tensors_;
  uint64_t total_bytes_ = 0;
  int64_t total_elements_ = 0;
};

// `name` as a file of `folder`. user_error, naming `origin`, when it is no plain name (empty, "..", with a
// slash), or is a link that leads out of the folder. The one way out that is allowed is the cache of the
// Hugging Face hub, where REPO/snapshots/REVISION/FILE is a link into REPO/blobs.
std::filesystem::path file_inside(const std::filesystem::path& folder, std::string_view name,
                                  std::string_view origin);

struct WriteTensorsOptions {
  std::string stem = "model";
  uint64_t max_shard_bytes =
      uint64_t{5'000'000'000};  // of tensor data; a larger tensor gets a shard of its own
  std::map<std::string, std::string> metadata = {{"format", "pt"}};
};

// The files that `tensors` are written to, in order: names, and which tensors they hold.
struct ShardPlan {
  std::string name;
  size_t begin = 0, end = 0;
};
std::vector<ShardPlan> plan_shards(const std::vector<TensorSpec>& tensors,
                                   const WriteTensorsOptions& options);

// The index of more than one shard, under the name that readers look for; nothing for one.
std::map<std::string, FileDigest> write_shard_index(const std::filesystem::path& folder,
                                                    const std::vector<TensorSpec>& tensors,
                                                    const std::vector<ShardPlan>& shards,
                                                    const WriteTensorsOptions& options);

// Writes the data of tensors[i] to the writer, in pieces of any size.
using TensorSource = std::function<void(size_t i, SafetensorsWriter& writer)>;

// Writes one file, or shards and an index, into an existing folder that holds none of them; every file is
// fsynced, the folder is not. Returns name and digest of each file. Memory: one block of the writer and what
// `source` takes.
std::map<std::string, FileDigest> write_tensors(const std::filesystem::path& folder,
                                                const std::vector<TensorSpec>& tensors,
                                                const TensorSource& source,
                                                const WriteTensorsOptions& options);

// Writes a file as write_file_synced does and returns its digest.
FileDigest write_with_digest(const std::filesystem::path& path, std::string_view bytes);

}  // namespace biomoe
