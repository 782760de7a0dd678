#include "biomoe/checkpoint/training_checkpoint.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <limits>
#include <set>
#include <tuple>

#include "biomoe/checkpoint/checkpoint_manifest.h"
#include "biomoe/checkpoint/json_text.h"
#include "biomoe/checkpoint/staging_folder.h"
#include "biomoe/checkpoint/tensor_index.h"
#include "biomoe/core/clock.h"
#include "biomoe/core/descriptor.h"
#include "biomoe/core/error.h"
#include "biomoe/core/file.h"
#include "biomoe/core/version.h"

namespace biomoe {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr char kFormat[] = "biomoe-training";
constexpr int64_t kFormatVersion = 1;
constexpr char kStateFile[] = "state.json";
constexpr char kPointerFile[] = "latest";
constexpr char kStepPrefix[] = "step_";
constexpr size_t kMaxStepDigits = 18;  // fits 63 bits

std::optional<int64_t> step_of(std::string_view name) {
  const std::string_view prefix = kStepPrefix;
  if (name.substr(0, prefix.size()) != prefix) return std::nullopt;
  name.remove_prefix(prefix.size());
  if (name.empty() || name.size() > kMaxStepDigits || name.find_first_not_of("0123456789") != name.npos ||
      (name.size() > 1 && name.front() == '0')) {
    return std::nullopt;
  }
  return std::stoll(std::string(name));
}

bool is_group_name(const std::string& name) {
  return !name.empty() &&
         std::all_of(name.begin(), name.end(), [](unsigned char c) { return std::isalnum(c) || c == '_'; });
}

void check_groups(const std::vector<TensorGroup>& groups) {
  std::set<std::string> names;
  for (const auto& group : groups) {
    BM_CHECK(is_group_name(group.name) && names.insert(group.name).second,
             "the tensor group name '{}' is odd or given twice", group.name);
    std::set<std::string> tensors;
    for (const auto& tensor : group.tensors) {
      BM_CHECK((tensor.view || tensor.view.num_elements() == 0) && tensor.view.contiguous(),
               "{}/{} is absent or not contiguous", group.name, tensor.name);
      BM_CHECK(tensors.insert(tensor.name).second, "{}/{} is given twice", group.name, tensor.name);
    }
  }
}

// What read_checkpoint_header throws for a checkpoint that only a newer program can read.
class NewerFormat : public Error {
 public:
  using Error::Error;
};

// A step_N folder as it lies there, sound or not.
struct StepFolder {
  int64_t step = 0;  // by its name
  fs::path path{};
  std::optional<int64_t> save_index{};  // absent: its header cannot be read
  std::string problem{};                // why it is no complete checkpoint; "" when it is one
  bool newer_format = false;

  // Where a folder that does not say when it was saved counts as the newest.
  auto order() const { return std::pair(save_index.value_or(std::numeric_limits<int64_t>::max()), step); }
};

// Sizes are compared, contents are not read.
StepFolder look_at(int64_t step, const fs::path& path) {
  StepFolder folder{.step = step, .path = path};
  try {
    const CheckpointHeader header = read_checkpoint_header(path);
    folder.save_index = header.save_index;
    if (header.step != step) {
      folder.problem =
          fmt::format("it holds step {}; rename it back to {}{}", header.step, kStepPrefix, header.step);
    } else if (const auto problems = CheckpointManifest::read(path).check_sizes(path); !problems.empty()) {
      folder.problem = problems.front();
    }
  } catch (const NewerFormat& error) {
    folder.newer_format = true;
    folder.problem = error.what();
  } catch (const Error& error) {
    folder.problem = error.what();
  }
  return folder;
}

// The step_N folders in the order they were saved.
std::vector<StepFolder> scan(const fs::path& checkpoints) {
  std::vector<StepFolder> found;
  std::error_code error;
  if (!fs::is_directory(checkpoints, error)) return found;
  for (const std::string& name : folder_names(checkpoints)) {
    if (const auto step = step_of(name)) found.push_back(look_at(*step, checkpoints / name));
  }
  std::sort(found.begin(), found.end(),
            [](const StepFolder& a, const StepFolder& b) { return a.order() < b.order(); });
  return found;
}

// The step that the pointer names. Absent when it names none, or is no file.
std::optional<int64_t> pointed_step(const fs::path& pointer) {
  try {
    std::string name = read_file(pointer, 4096);
    if (!name.empty() && name.back() == '\n') name.pop_back();
    return step_of(name);
  } catch (const Error&) {
    return std::nullopt;
  }
}

FileDigest write_json(const fs::path& path, const json& value) {
  try {
    return write_with_digest(path, value.dump(2) + "\n");
  } catch (const json::exception&) {
    throw failure("{}: the state holds text that is not UTF-8", path.string());
  }
}

// The first disagreement of the tensors asked for and the tensors there, if any.
void check_tensors(const TensorFolder& there, const TensorGroup& group) {
  std::set<std::string> wanted;
  for (const auto& tensor : group.tensors) {
    wanted.insert(tensor.name);
    const auto place = there.find(tensor.name);
    if (!place) {
      throw user_error("{}: the checkpoint has no tensor {} {}, which the model needs", there.origin(),
                       quote(tensor.name), tensor.whole_shape().str());
    }
    if (!(place.entry->shape == tensor.whole_shape())) {
      throw user_error("{}: tensor {} is {} in the checkpoint, {} in the model", there.origin(),
                       quote(tensor.name), place.entry->shape.str(), tensor.whole_shape().str());
    }
    if (place.entry->dtype != tensor.view.dtype) {
      throw user_error("{}: tensor {} is {} in the checkpoint, {} in the model", there.origin(),
                       quote(tensor.name), dtype_name(place.entry->dtype), dtype_name(tensor.view.dtype));
    }
  }
  for (const auto& [name, place] : there.tensors()) {
    if (!wanted.count(name)) {
      throw user_error("{}: the checkpoint has a tensor {} {}, for which the model has no place",
                       there.origin(), quote(name), place.entry->shape.str());
    }
  }
}

}  // namespace

std::vector<TensorSpec> tensor_specs(const TensorGroup& group) {
  std::vector<TensorSpec> specs;
  for (const auto& tensor : group.tensors)
    specs.push_back({tensor.name, tensor.view.dtype, tensor.whole_shape()});
  return specs;
}

uint64_t total_bytes(const std::vector<TensorGroup>& groups) {
  uint64_t bytes = 0;
  for (const auto& group : groups) {
    for (const auto& tensor : group.tensors) bytes += tensor.view.bytes();
  }
  return bytes;
}

CheckpointStore::CheckpointStore(fs::path folder, CheckpointOptions options)
    : folder_(std::move(folder)), options_(std::move(options)) {
  BM_CHECK(options_.max_checkpoints >= 0, "max_checkpoints={} is negative", options_.max_checkpoints);
}

fs::path CheckpointStore::step_path(int64_t step) const {
  return folder_ / fmt::format("{}{}", kStepPrefix, step);
}

SaveReport CheckpointStore::save(int64_t step, const std::vector<TensorGroup>& groups,
                                 const json& state) const {
  check_groups(groups);
  for (const auto& group : groups) {
    for (const auto& tensor : group.tensors)
      BM_CHECK(!tensor.part, "{}/{} is a part of a tensor", group.name, tensor.name);
  }
  std::optional<CheckpointSave> save;
  try {
    save.emplace(*this, step);
    std::map<std::string, FileDigest> files;
    for (const auto& group : groups) {
      const auto source = [&](size_t i, SafetensorsWriter& writer) {
        writer.write(group.tensors[i].view.data, group.tensors[i].view.bytes());
      };
      files.merge(write_tensors(save->folder(), tensor_specs(group), source,
                                {.stem = group.name, .max_shard_bytes = options_.max_shard_bytes}));
    }
    save->commit(groups, std::move(files), state);
  } catch (const Error& error) {
    throw checkpoint_not_saved(step_path(step), error);
  }
  return save->publish();
}

Error checkpoint_not_saved(const fs::path& step_folder, const Error& why) {
  return failure("checkpoint {} was not saved, the ones before it are untouched: {}", step_folder.string(),
                 why.what());
}

CheckpointSave::CheckpointSave(const CheckpointStore& store, int64_t step)
    : store_(prepared(store, step)),
      start_(now_seconds()),
      report_{.step = step, .path = store.step_path(step)},
      staging_(report_.path) {}

// The store, once its folder is there and without what dead saves left.
const CheckpointStore& CheckpointSave::prepared(const CheckpointStore& store, int64_t step) {
  BM_CHECK(step >= 0 && step_of(store.step_path(step).filename().string()),
           "step {} cannot name a checkpoint", step);
  const fs::path& folder = store.folder();
  std::error_code error;
  if (fs::create_directories(folder, error)) sync_folder(fs::absolute(folder).parent_path());
  if (error) throw failure("{}: cannot create the folder: {}", folder.string(), error.message());
  remove_leftovers(folder, kStepPrefix);
  return store;
}

void CheckpointSave::commit(const std::vector<TensorGroup>& groups, std::map<std::string, FileDigest> files,
                            const json& state) {
  BM_CHECK(!groups.empty() && state.is_object(), "a checkpoint needs tensors and a state object");
  std::vector<std::string> names;
  for (const auto& group : groups) names.push_back(group.name);
  CheckpointManifest manifest;
  manifest.files = std::move(files);
  int64_t save_index = 1;
  for (const StepFolder& before : scan(store_.folder()))
    save_index = std::max(save_index, before.save_index.value_or(0) + 1);
  manifest.files[kStateFile] = write_json(folder() / kStateFile, {{"format", kFormat},
                                                                  {"format_version", kFormatVersion},
                                                                  {"biomoe_version", kVersion},
                                                                  {"step", report_.step},
                                                                  {"save_index", save_index},
                                                                  {"groups", names},
                                                                  {"state", state}});
  report_.bytes = manifest.write(folder()).bytes;
  for (const auto& [name, digest] : manifest.files) report_.bytes += digest.bytes;
  staging_.commit();
}

SaveReport CheckpointSave::publish() {
  const fs::path pointer = store_.folder() / kPointerFile;
  try {
    replace_file(pointer, report_.path.filename().string() + "\n");
  } catch (const Error& error) {
    throw failure("checkpoint {} is saved, but the pointer to it is not: {}", report_.path.string(),
                  error.what());
  }
  prune();
  report_.seconds = now_seconds() - start_;
  return report_;
}

void CheckpointSave::prune() {
  const int64_t most = store_.options().max_checkpoints;
  if (most == 0) return;
  std::vector<CheckpointInfo> complete = store_.list();
  const auto keep = static_cast<size_t>(most);
  if (complete.size() <= keep) return;
  const VerifyResult written = verify_checkpoint(report_.path);
  if (!written.ok()) {
    throw failure("checkpoint {} does not read back as written, older ones are kept: {}",
                  report_.path.string(), written.problems.front());
  }
  const size_t surplus = complete.size() - keep;
  for (size_t i = 0; i < surplus; ++i) {
    if (complete[i].step == report_.step) continue;
    remove_folder(complete[i].path);
    report_.pruned.push_back(complete[i].path);
  }
}

json CheckpointStore::load(int64_t step, const std::vector<TensorGroup>& groups) const {
  return load_checkpoint(step_path(step), groups).state;
}

bool CheckpointStore::empty() const {
  return scan(folder_).empty();
}

std::vector<CheckpointInfo> CheckpointStore::list() const {
  std::vector<CheckpointInfo> found;
  for (const StepFolder& folder : scan(folder_)) {
    if (folder.problem.empty()) found.push_back({folder.step, *folder.save_index, folder.path});
  }
  return found;
}

std::optional<CheckpointInfo> CheckpointStore::latest() const {
  const auto step = pointed_step(folder_ / kPointerFile);
  for (const auto& info : list()) {
    if (step && info.step == *step) return info;
  }
  return std::nullopt;
}

std::optional<CheckpointInfo> CheckpointStore::latest_good() const {
  const std::vector<StepFolder> folders = scan(folder_);
  for (const StepFolder& folder : folders) {
    if (folder.newer_format) {
      throw user_error("{}; use that version of biomoe, or move the folder away", folder.problem);
    }
  }
  const fs::path pointer = folder_ / kPointerFile;
  const auto pointed = pointed_step(pointer);
  std::error_code error;
  if (fs::exists(pointer, error) &&
      std::none_of(folders.begin(), folders.end(),
                   [&](const StepFolder& folder) { return folder.step == pointed; })) {
    warn(fmt::format("{}: names no checkpoint that is there", pointer.string()));
  }
  std::string newest_problem;
  for (auto folder = folders.rbegin(); folder != folders.rend(); ++folder) {
    std::string problem = folder->problem;
    if (problem.empty()) {
      const VerifyResult result = verify_checkpoint(folder->path);
      if (result.ok()) return CheckpointInfo{folder->step, *folder->save_index, folder->path};
      problem = result.problems.front();
    }
    warn(fmt::format("checkpoint {} is damaged and passed over: {}", folder->path.string(), problem));
    if (newest_problem.empty()) newest_problem = problem;
  }
  if (folders.empty()) return std::nullopt;
  throw user_error("{}: none of its {} checkpoints can be used ({}); repair one, or move all of them away",
                   folder_.string(), folders.size(), newest_problem);
}

void CheckpointStore::require_writable() const {
  std::error_code error;
  fs::path place = fs::absolute(folder_);
  while (fs::symlink_status(place, error).type() == fs::file_type::not_found && place.has_relative_path())
    place = place.parent_path();
  if (!fs::is_directory(place, error)) {
    throw user_error("{}: checkpoints cannot be saved there: {} is {}; remove it, or choose another folder",
                     folder_.string(), place.string(), error ? error.message() : "not a folder");
  }
  if (access(place.c_str(), W_OK | X_OK) != 0) {
    throw user_error("{}: checkpoints cannot be saved there: {}: {}; choose another folder", folder_.string(),
                     place.string(), std::strerror(errno));
  }
  const fs::path pointer = folder_ / kPointerFile;
  if (fs::exists(pointer, error) && !fs::is_regular_file(pointer, error)) {
    throw user_error("{}: is in the way of the file that names the newest checkpoint; remove it",
                     pointer.string());
  }
}

VerifyResult CheckpointStore::verify(int64_t step) const {
  return verify_checkpoint(step_path(step));
}

void CheckpointStore::warn(const std::string& line) const {
  if (options_.warn) options_.warn(line);
}

CheckpointHeader read_checkpoint_header(const fs::path& step_folder) {
  const std::string origin = (step_folder / kStateFile).string();
  const json file = read_json(step_folder / kStateFile);
  const auto text = [&](const char* key) {
    if (!file.is_object() || !file.contains(key) || !file.at(key).is_string()) {
      throw user_error("{}: not the state of a training checkpoint ({} is missing)", origin, key);
    }
    return file.at(key).get<std::string>();
  };
  const auto count = [&](const char* key) {
    if (!file.contains(key) || !file.at(key).is_number_unsigned() || file.at(key).get<uint64_t>() >> 62) {
      throw user_error("{}: {} is missing or not a count", origin, key);
    }
    return file.at(key).get<int64_t>();
  };
  if (text("format") != kFormat) throw user_error("{}: format {} is unknown", origin, quote(text("format")));
  CheckpointHeader header;
  header.biomoe_version = text("biomoe_version");
  if (const int64_t version = count("format_version"); version != kFormatVersion) {
    const Error error =
        user_error("{}: format version {} was written by biomoe {}; this program reads version {}", origin,
                   version, header.biomoe_version, kFormatVersion);
    if (version > kFormatVersion) throw NewerFormat(error.kind(), error.what());
    throw error;
  }
  header.step = count("step");
  header.save_index = count("save_index");
  if (!file.contains("groups") || !file.at("groups").is_array() || !file.contains("state") ||
      !file.at("state").is_object()) {
    throw user_error("{}: groups or state is missing", origin);
  }
  for (const auto& name : file.at("groups")) {
    if (!name.is_string() || !is_group_name(name.get<std::string>()))
      throw user_error("{}: groups holds something that is no name", origin);
    header.groups.push_back(name.get<std::string>());
  }
  header.state = file.at("state");
  return header;
}

CheckpointHeader load_checkpoint(const fs::path& step_folder, const std::vector<TensorGroup>& groups) {
  check_groups(groups);
  CheckpointHeader header = read_checkpoint_header(step_folder);
  std::vector<TensorFolder> folders;
  for (const auto& group : groups) {
    if (std::find(header.groups.begin(), header.groups.end(), group.name) == header.groups.end()) {
      throw user_error("{}: the checkpoint holds no {} tensors", step_folder.string(), quote(group.name));
    }
    check_tensors(folders.emplace_back(step_folder, group.name), group);
  }
  for (size_t i = 0; i < groups.size(); ++i) {
    for (const auto& tensor : groups[i].tensors) {
      const auto place = folders[i].find(tensor.name);
      const size_t element = dtype_size(tensor.view.dtype);
      place.file->read_part(*place.entry, static_cast<uint64_t>(tensor.first_element()) * element,
                            tensor.view.bytes(), tensor.view.data);
    }
  }
  return header;
}

VerifyResult verify_checkpoint(const fs::path& step_folder) {
  VerifyResult result;
  try {
    const CheckpointManifest manifest = CheckpointManifest::read(step_folder);
    result = manifest.verify(step_folder);
    const CheckpointHeader header = read_checkpoint_header(step_folder);
    for (const auto& group : header.groups) TensorFolder(step_folder, group);
  } catch (const Error& error) {
    result.problems.push_back(error.what());
  }
  return result;
}

bool is_training_checkpoint(const fs::path& folder) {
  std::error_code error;
  return fs::exists(folder / kStateFile, error);
}

fs::path find_checkpoint(const fs::path& path, const std::function<void(const std::string&)>& warn) {
  if (is_training_checkpoint(path)) return path;
  std::error_code error;
  if (fs::is_regular_file(path, error)) {
    throw user_error("{}: is a file; name the run folder, its checkpoints folder or a {}N folder in it",
                     path.string(), kStepPrefix);
  }
  for (const fs::path& folder : {path, path / "checkpoints"}) {
    if (!fs::is_directory(folder, error)) continue;
    const auto good = CheckpointStore(folder, {.warn = warn}).latest_good();
    if (good) return good->path;
  }
  throw user_error("{}: holds no complete training checkpoint", path.string());
}

}  // namespace biomoe
