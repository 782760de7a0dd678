#include "biomoe/checkpoint/tensor_index.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "biomoe/checkpoint/json_text.h"
#include "biomoe/core/descriptor.h"
#include "biomoe/core/error.h"
#include "biomoe/core/file.h"

namespace biomoe {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr size_t kMaxShards = 100'000;  // five digits in a name

// "STEM-ddddd-of-ddddd.safetensors"
bool is_shard_name(std::string_view name, std::string_view stem) {
  const std::string_view pattern = "-#####-of-#####.safetensors";
  if (name.size() != stem.size() + pattern.size() || name.substr(0, stem.size()) != stem) return false;
  name.remove_prefix(stem.size());
  for (size_t i = 0; i < pattern.size(); ++i) {
    const bool digit = name[i] >= '0' && name[i] <= '9';
    if (pattern[i] == '#' ? !digit : name[i] != pattern[i]) return false;
  }
  return true;
}

void refuse_stray_shards(const fs::path& folder, std::string_view stem,
                         const std::vector<std::string>& known) {
  for (const std::string& name : folder_names(folder)) {
    if (is_shard_name(name, stem) && std::find(known.begin(), known.end(), name) == known.end()) {
      throw user_error("{}: the shard {} is not part of this checkpoint; move it away", folder.string(),
                       quote(name));
    }
  }
}

bool is_inside(const fs::path& file, const fs::path& folder) {
  const auto [end, rest] = std::mismatch(folder.begin(), folder.end(), file.begin(), file.end());
  return end == folder.end() && rest != file.end();
}

// The sizes that total_size may state: an integer, or (some writers) the same as a floating-point number.
void check_total_size(const json& index, uint64_t actual, const std::string& origin) {
  if (!index.contains("metadata")) return;
  const json& metadata = index.at("metadata");
  if (!metadata.is_object()) throw user_error("{}: metadata is not an object", origin);
  if (!metadata.contains("total_size")) return;
  const json& stated = metadata.at("total_size");
  if (!stated.is_number()) throw user_error("{}: metadata.total_size is not a number", origin);
  const bool equal = stated.is_number_unsigned() ? stated.get<uint64_t>() == actual
                                                 : stated.get<double>() == static_cast<double>(actual);
  if (!equal) {
    throw user_error("{}: metadata.total_size is {}, the tensors take {} bytes", origin, stated.dump(),
                     actual);
  }
}

}  // namespace

fs::path file_inside(const fs::path& folder, std::string_view name, std::string_view origin) {
  if (name.empty() || name == "." || name == ".." ||
      name.find_first_of(std::string_view("/\\\0", 3)) != name.npos) {
    throw user_error("{}: {} is not the name of a file in the same folder", origin, quote(name));
  }
  const fs::path path = folder / name;
  std::error_code error;
  const fs::path real_folder = fs::canonical(folder, error);
  if (error) throw user_error("{}: cannot open: {}", folder.string(), error.message());
  const fs::path real_file = fs::canonical(path, error);
  if (error) throw user_error("{}: the file {} is missing: {}", origin, quote(name), error.message());
  if (is_inside(real_file, real_folder)) return path;
  const fs::path revisions = real_folder.parent_path();
  if (revisions.filename() == "snapshots" && is_inside(real_file, revisions.parent_path() / "blobs"))
    return path;
  throw user_error("{}: {} is a link that leads out of the folder, to {}", origin, quote(name),
                   quote(real_file.string()));
}

TensorFolder::TensorFolder(const fs::path& folder, std::string_view stem) {
  const std::string single = fmt::format("{}.safetensors", stem);
  const std::string index = single + ".index.json";
  std::error_code error;
  if (!fs::is_directory(folder, error)) throw user_error("{}: not a folder", folder.string());
  const bool has_single = fs::exists(fs::symlink_status(folder / single, error));
  const bool has_index = fs::exists(fs::symlink_status(folder / index, error));
  if (has_single && has_index) {
    throw user_error("{}: holds both {} and {}; move the one that is not meant away", folder.string(), single,
                     index);
  }
  if (!has_single && !has_index) {
    const bool pickle = fs::exists(folder / "pytorch_model.bin", error) ||
                        fs::exists(folder / "pytorch_model.bin.index.json", error);
    throw user_error("{}: neither {} nor {} is there{}", folder.string(), single, index,
                     pickle ? "; pytorch_model.bin is not read, save the model as safetensors" : "");
  }
  if (has_single) {
    open_single(folder, single);
  } else {
    open_shards(folder, file_inside(folder, index, folder.string()));
  }
  refuse_stray_shards(folder, stem, file_names_);
}

TensorFolder::Place TensorFolder::find(const std::string& name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? Place{} : found->second;
}

void TensorFolder::open_single(const fs::path& folder, const std::string& file) {
  origin_ = (folder / file).string();
  files_.reserve(1);
  add_file(folder, file);
}

void TensorFolder::open_shards(const fs::path& folder, const fs::path& index_path) {
  origin_ = index_path.string();
  sharded_ = true;
  const json index =
      read_json(index_path, {.max_bytes = uint64_t{256} << 20, .max_depth = 8, .max_values = 16'000'000});
  if (!index.is_object() || !index.contains("weight_map") || !index.at("weight_map").is_object()) {
    throw user_error("{}: there is no weight_map object", origin_);
  }
  const json& weight_map = index.at("weight_map");
  std::set<std::string> shards;
  for (const auto& [tensor, shard] : weight_map.items()) {
    if (!shard.is_string()) throw user_error("{}: the shard of {} is not a name", origin_, quote(tensor));
    shards.insert(shard.get<std::string>());
  }
  if (shards.empty()) throw user_error("{}: weight_map is empty", origin_);
  if (shards.size() > kMaxShards) throw user_error("{}: more than {} shards", origin_, kMaxShards);
  for (const auto& shard : shards) file_inside(folder, shard, origin_);
  files_.reserve(shards.size());  // places hold pointers to the files
  for (const auto& shard : shards) add_file(folder, shard);

  for (const auto& [tensor, shard] : weight_map.items()) {
    const Place place = find(tensor);
    if (!place) throw user_error("{}: tensor {} is in none of the shards", origin_, quote(tensor));
    const std::string actual = fs::path(place.file->name()).filename().string();
    if (actual != shard.get_ref<const std::string&>()) {
      throw user_error("{}: tensor {} should be in {} and is in {}", origin_, quote(tensor),
                       quote(shard.get_ref<const std::string&>()), quote(actual));
    }
  }
  for (const auto& [tensor, place] : tensors_) {
    if (!weight_map.contains(tensor)) {
      throw user_error("{}: tensor {} is not in the index", place.file->name(), quote(tensor));
    }
  }
  check_total_size(index, total_bytes_, origin_);
}

void TensorFolder::add_file(const fs::path& folder, const std::string& name) {
  const SafetensorsFile& file = files_.emplace_back(file_inside(folder, name, origin_));
  file_names_.push_back(name);
  for (const auto& entry : file.entries()) {
    const auto [place, added] = tensors_.emplace(entry.name, Place{&file, &entry});
    if (!added) {
      throw user_error("{}: tensor {} is also in {}", file.name(), quote(entry.name),
                       place->second.file->name());
    }
    total_bytes_ += entry.bytes;
    total_elements_ += entry.num_elements();
  }
}

std::vector<ShardPlan> plan_shards(const std::vector<TensorSpec>& tensors,
                                   const WriteTensorsOptions& options) {
  BM_CHECK(!tensors.empty(), "a checkpoint with no tensors");
  std::vector<ShardPlan> shards;
  uint64_t shard_bytes = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const uint64_t bytes = tensors[i].bytes();
    if (i == 0 || (shard_bytes > 0 && shard_bytes + bytes > options.max_shard_bytes)) {
      shards.push_back({.name = "", .begin = i, .end = i});
      shard_bytes = 0;
    }
    shard_bytes += bytes;
    shards.back().end = i + 1;
  }
  if (shards.size() >= kMaxShards) {
    throw user_error("max_shard_size={} would make {} files; raise it", options.max_shard_bytes,
                     shards.size());
  }
  for (size_t i = 0; i < shards.size(); ++i) {
    shards[i].name = shards.size() == 1
                         ? fmt::format("{}.safetensors", options.stem)
                         : fmt::format("{}-{:05}-of-{:05}.safetensors", options.stem, i + 1, shards.size());
  }
  return shards;
}

std::map<std::string, FileDigest> write_shard_index(const fs::path& folder,
                                                    const std::vector<TensorSpec>& tensors,
                                                    const std::vector<ShardPlan>& shards,
                                                    const WriteTensorsOptions& options) {
  if (shards.size() == 1) return {};
  json weight_map = json::object();
  uint64_t total_bytes = 0;
  int64_t total_elements = 0;
  for (const ShardPlan& shard : shards) {
    for (size_t i = shard.begin; i < shard.end; ++i) {
      weight_map[tensors[i].name] = shard.name;
      total_bytes += tensors[i].bytes();
      total_elements += tensors[i].shape.num_elements();
    }
  }
  const json index = {{"metadata", {{"total_parameters", total_elements}, {"total_size", total_bytes}}},
                      {"weight_map", weight_map}};
  const std::string name = options.stem + ".safetensors.index.json";
  return {{name, write_with_digest(folder / name, index.dump(2) + "\n")}};
}

std::map<std::string, FileDigest> write_tensors(const fs::path& folder,
                                                const std::vector<TensorSpec>& tensors,
                                                const TensorSource& source,
                                                const WriteTensorsOptions& options) {
  const std::vector<ShardPlan> shards = plan_shards(tensors, options);
  std::map<std::string, FileDigest> digests;
  for (const ShardPlan& shard : shards) {
    const auto begin = tensors.begin() + static_cast<std::ptrdiff_t>(shard.begin);
    const auto end = tensors.begin() + static_cast<std::ptrdiff_t>(shard.end);
    SafetensorsWriter writer(folder / shard.name, {begin, end}, options.metadata);
    for (size_t i = shard.begin; i < shard.end; ++i) source(i, writer);
    digests[shard.name] = writer.finish();
  }
  digests.merge(write_shard_index(folder, tensors, shards, options));
  return digests;
}

FileDigest write_with_digest(const fs::path& path, std::string_view bytes) {
  write_file_synced(path, bytes);
  return {bytes.size(), crc32_update(0, bytes.data(), bytes.size())};
}

}  // namespace biomoe
