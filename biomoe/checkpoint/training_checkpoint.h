// Training checkpoints: a run's checkpoints/step_N folders. See docs/checkpoints.md for the files.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "biomoe/checkpoint/checksum.h"
#include "biomoe/checkpoint/safetensors_writer.h"
#include "biomoe/checkpoint/staging_folder.h"
#include "biomoe/core/error.h"
#include "biomoe/core/tensor_view.h"

namespace biomoe {

// A stretch of a tensor that ranks hold parts of.
struct TensorPart {
  Shape whole;        // of the tensor
  int64_t begin = 0;  // element of it that is the first here
};

struct NamedTensor {
  std::string name;
  TensorView view;                   // contiguous; all element types
  std::optional<TensorPart> part{};  // absent: the view is the whole tensor
  const Shape& whole_shape() const { return part ? part->whole : view.shape; }
  int64_t first_element() const { return part ? part->begin : 0; }
};

// Tensors saved together under one stem: "model", "exp_avg", "exp_avg_sq", ...
struct TensorGroup {
  std::string name;  // letters, digits and underscores
  std::vector<NamedTensor> tensors;
};

// Names, types and whole shapes, in order.
std::vector<TensorSpec> tensor_specs(const TensorGroup& group);

uint64_t total_bytes(const std::vector<TensorGroup>& groups);

struct CheckpointOptions {
  int64_t max_checkpoints = 0;                         // kept after a save; 0: all
  uint64_t max_shard_bytes = uint64_t{4'000'000'000};  // of one safetensors file
  std::function<void(const std::string&)> warn =
      {};  // told one line; may be called from the thread that saves
};

struct SaveReport {
  int64_t step = 0;
  std::filesystem::path path;
  uint64_t bytes = 0;  // of all files
  double seconds = 0;
  std::vector<std::filesystem::path> pruned{};
};

struct CheckpointInfo {
  int64_t step = 0;
  int64_t save_index = 0;  // grows by one a save in a folder: the order in which checkpoints were made
  std::filesystem::path path;
};

struct VerifyResult {
  std::vector<std::string> problems;  // one line each
  uint64_t bytes = 0;                 // checked
  int64_t files = 0;
  bool ok() const { return problems.empty(); }
};

// The checkpoints folder of a run. One process saves at a time; any number may read.
class CheckpointStore {
 public:
  // The folder need not exist before the first save.
  explicit CheckpointStore(std::filesystem::path folder, CheckpointOptions options = {});

  // Writes step_N beside its place, fsyncs every file and folder, renames it into place and replaces the
  // pointer `latest`. A crash at any moment leaves the checkpoints before it as they were. Saving a step that
  // exists replaces it. Afterwards the oldest beyond max_checkpoints are deleted, but only once the new one
  // has been read back and its checksums agree. Leftovers of dead saves are removed first. `state` is an
  // object of the trainer's own (see TrainingState). failure, one line, when the disk is full or refuses:
  // nothing of the attempt stays, what was there stays.
  SaveReport save(int64_t step, const std::vector<TensorGroup>& groups, const nlohmann::json& state) const;

  const CheckpointOptions& options() const { return options_; }

  // Fills the views of `groups` from step_N and returns its state; see load_checkpoint.
  nlohmann::json load(int64_t step, const std::vector<TensorGroup>& groups) const;

  bool empty() const;  // no step_N folder, sound or not
  // Checkpoints with all their files, each of its size, in the order they were saved. Files that no
  // checkpoint has are not looked at.
  std::vector<CheckpointInfo> list() const;
  // What the pointer names, if it names a complete checkpoint.
  std::optional<CheckpointInfo> latest() const;
  // The last one saved whose checksums verify; nothing when there is no step_N folder. Warns of each that is
  // passed over, with what is wrong with it: those saved later, and those that do not say when they were.
  // Reads every byte of the ones it tries. user_error when there are step_N folders and none can be used, and
  // when one was written by a newer format.
  std::optional<CheckpointInfo> latest_good() const;
  // For saves that come after long work: user_error when the folder, or the nearest one above it that is
  // there, is none or cannot be written, or when something that is no file has the pointer's name. Writes
  // nothing.
  void require_writable() const;
  VerifyResult verify(int64_t step) const;

  std::filesystem::path step_path(int64_t step) const;
  const std::filesystem::path& folder() const { return folder_; }
  void warn(const std::string& line) const;  // through options.warn

 private:
  std::filesystem::path folder_;
  CheckpointOptions options_;
};

// What CheckpointStore::save does around the writing of the tensors, for other ways of writing them (see
// ranked_save.h): from the hidden folder that the constructor makes to publish(). An object that goes before
// commit() takes the folder with it. Until then what is thrown says why, see checkpoint_not_saved.
class CheckpointSave {
 public:
  CheckpointSave(const CheckpointStore& store, int64_t step);
  const std::filesystem::path& folder() const { return staging_.path(); }
  // The files of the groups are in the folder, fsynced.
  void commit(const std::vector<TensorGroup>& groups, std::map<std::string, FileDigest> files,
              const nlohmann::json& state);
  // Replaces the pointer and deletes the oldest.
  SaveReport publish();

 private:
  static const CheckpointStore& prepared(const CheckpointStore& store, int64_t step);
  void prune();

  CheckpointStore store_;
  double start_;
  SaveReport report_;
  StagingFolder staging_;
};

// failure "checkpoint STEP_FOLDER was not saved, the ones before it are untouched: WHY".
Error checkpoint_not_saved(const std::filesystem::path& step_folder, const Error& why);

// What state.json holds besides the trainer's state.
struct CheckpointHeader {
  int64_t step = 0;
  int64_t save_index = 0;
  std::string biomoe_version;       // that wrote it
  std::vector<std::string> groups;  // stems
  nlohmann::json state;             // the trainer's
};

// The header of a step folder. user_error when it is none, is damaged, or was written by a newer format.
CheckpointHeader read_checkpoint_header(const std::filesystem::path& step_folder);

// Fills the views of `groups` (a part of the checkpoint's groups will do, and parts of its tensors) and
// returns the header. Everything is checked before the first byte is copied: user_error naming the first
// tensor that one side lacks or whose shape or type differ, or the file that is damaged. Checksums are not
// computed: verify first.
CheckpointHeader load_checkpoint(const std::filesystem::path& step_folder,
                                 const std::vector<TensorGroup>& groups);

// Structure, sizes and checksums of every file. Never throws for what is wrong with the files.
VerifyResult verify_checkpoint(const std::filesystem::path& step_folder);

bool is_training_checkpoint(const std::filesystem::path& folder);  // has a state.json

// A step folder from what a user names: itself, a checkpoints folder, or a run folder that has one (their
// latest good one, as latest_good finds it). user_error when there is none.
std::filesystem::path find_checkpoint(const std::filesystem::path& path,
                                      const std::function<void(const std::string&)>& warn = {});

}  // namespace biomoe
