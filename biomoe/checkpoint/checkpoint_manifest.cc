#include "biomoe/checkpoint/checkpoint_manifest.h"

#include <charconv>
#include <nlohmann/json.hpp>

#include "biomoe/checkpoint/json_text.h"
#include "biomoe/checkpoint/tensor_index.h"
#include "biomoe/core/error.h"

namespace biomoe {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr char kManifestFile[] = "checksums.json";
constexpr char kAlgorithm[] = "crc32";

FileDigest parse_digest(const json& value, const std::string& origin, const std::string& name) {
  FileDigest digest;
  if (value.is_object() && value.contains("bytes") && value.at("bytes").is_number_unsigned() &&
      value.contains(kAlgorithm) && value.at(kAlgorithm).is_string()) {
    digest.bytes = value.at("bytes").get<uint64_t>();
    const auto& text = value.at(kAlgorithm).get_ref<const std::string&>();
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), digest.crc32, 16);
    if (error == std::errc() && end == text.data() + text.size() && text.size() == 8) return digest;
  }
  throw user_error("{}: the entry of {} is not a size and a checksum", origin, quote(name));
}

}  // namespace

FileDigest CheckpointManifest::write(const fs::path& folder) const {
  json entries = json::object();
  for (const auto& [name, digest] : files) {
    entries[name] = {{"bytes", digest.bytes}, {kAlgorithm, crc32_text(digest.crc32)}};
  }
  const json file = {{"algorithm", kAlgorithm}, {"files", entries}};
  return write_with_digest(folder / kManifestFile, file.dump(2) + "\n");
}

CheckpointManifest CheckpointManifest::read(const fs::path& folder) {
  const std::string origin = (folder / kManifestFile).string();
  const json file = read_json(folder / kManifestFile);
  if (!file.is_object() || !file.contains("algorithm") || !file.contains("files") ||
      !file.at("files").is_object()) {
    throw user_error("{}: algorithm or files is missing", origin);
  }
  if (file.at("algorithm") != kAlgorithm)
    throw user_error("{}: the checksums are not {}", origin, kAlgorithm);
  CheckpointManifest manifest;
  for (const auto& [name, value] : file.at("files").items()) {
    file_inside(folder, name, origin);
    manifest.files[name] = parse_digest(value, origin, name);
  }
  return manifest;
}

std::vector<std::string> CheckpointManifest::check_sizes(const fs::path& folder) const {
  std::vector<std::string> problems;
  for (const auto& [name, digest] : files) {
    std::error_code error;
    const uint64_t size = fs::file_size(folder / name, error);
    if (error) {
      problems.push_back(fmt::format("{}: {}", (folder / name).string(), error.message()));
    } else if (size != digest.bytes) {
      problems.push_back(
          fmt::format("{}: {} bytes, {} were written", (folder / name).string(), size, digest.bytes));
    }
  }
  return problems;
}

VerifyResult CheckpointManifest::verify(const fs::path& folder) const {
  VerifyResult result;
  result.problems = check_sizes(folder);
  for (const auto& [name, digest] : files) {
    const FileDigest actual = digest_file(folder / name);
    ++result.files;
    result.bytes += actual.bytes;
    if (actual.bytes == digest.bytes && actual.crc32 != digest.crc32) {
      result.problems.push_back(fmt::format("{}: checksum {} differs from the {} written",
                                            (folder / name).string(), crc32_text(actual.crc32),
                                            crc32_text(digest.crc32)));
    }
  }
  return result;
}

}  // namespace biomoe
