#include "biomoe/checkpoint/safetensors_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

#include "biomoe/checkpoint/json_text.h"
#include "biomoe/core/error.h"

namespace biomoe {
namespace {

constexpr size_t kBlockBytes = size_t{1} << 20;
constexpr size_t kDataAlignment =
    64;  // of the first tensor in the file: a cache line, for readers that map it

// Written by hand rather than through a JSON object so that the text keeps the order of the data.
std::string header_text(const std::vector<TensorSpec>& tensors,
                        const std::map<std::string, std::string>& metadata) {
  std::string text = "{";
  if (!metadata.empty()) text += "\"__metadata__\":" + nlohmann::json(metadata).dump() + ",";
  uint64_t begin = 0;
  for (const auto& tensor : tensors) {
    BM_CHECK(begin % dtype_size(tensor.dtype) == 0, "tensor {} would not be aligned to its elements",
             tensor.name);
    const uint64_t end = begin + tensor.bytes();
    std::string shape;
    for (int axis = 0; axis < tensor.shape.rank(); ++axis) {
      shape += fmt::format("{}{}", axis ? "," : "", tensor.shape[axis]);
    }
    text += fmt::format(R"({}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}},)",
                        nlohmann::json(tensor.name).dump(), dtype_name(tensor.dtype), shape, begin, end);
    begin = end;
  }
  if (text.back() == ',') text.pop_back();
  text += '}';
  const size_t length = sizeof(uint64_t) + text.size();
  text.append((kDataAlignment - length % kDataAlignment) % kDataAlignment, ' ');
  return text;
}

}  // namespace

std::string safetensors_head(const std::vector<TensorSpec>& tensors,
                             const std::map<std::string, std::string>& metadata) {
  const std::string header = header_text(tensors, metadata);
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + header;
}

SafetensorsWriter::SafetensorsWriter(const std::filesystem::path& path,
                                     const std::vector<TensorSpec>& tensors,
                                     const std::map<std::string, std::string>& metadata)
    : path_(path), block_(kBlockBytes) {
  const std::string head = safetensors_head(tensors, metadata);
  expected_ = head.size();
  for (const auto& tensor : tensors) expected_ += tensor.bytes();
  file_ = Descriptor(open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
  if (!file_) throw failure("{}: cannot create: {}", path_.string(), std::strerror(errno));
  write(head.data(), head.size());
}

void SafetensorsWriter::write(const void* data, size_t bytes) {
  BM_CHECK(bytes <= expected_ - taken_, "{}: more bytes than the header announces", path_.string());
  taken_ += bytes;
  const auto* source = static_cast<const char*>(data);
  while (bytes > 0) {
    if (used_ == 0 && bytes >= kBlockBytes) {
      write_through(source, kBlockBytes);
      source += kBlockBytes;
      bytes -= kBlockBytes;
      continue;
    }
    const size_t part = std::min(bytes, kBlockBytes - used_);
    std::memcpy(block_.data() + used_, source, part);
    used_ += part;
    source += part;
    bytes -= part;
    if (used_ == kBlockBytes) flush();
  }
}

FileDigest SafetensorsWriter::finish() {
  BM_CHECK(taken_ == expected_, "{}: {} of {} bytes were written", path_.string(), taken_, expected_);
  flush();
  if (fsync(file_.get()) != 0) throw failure("{}: cannot fsync: {}", path_.string(), std::strerror(errno));
  if (file_.close_now() != 0) throw failure("{}: cannot close: {}", path_.string(), std::strerror(errno));
  return digest_;
}

void SafetensorsWriter::flush() {
  write_through(block_.data(), used_);
  used_ = 0;
}

void SafetensorsWriter::write_through(const char* data, size_t bytes) {
  digest_.crc32 = crc32_update(digest_.crc32, data, bytes);
  digest_.bytes += bytes;
  if (!write_all(file_.get(), {data, bytes})) {
    throw failure("{}: cannot write: {}", path_.string(), std::strerror(errno));
  }
}

}  // namespace biomoe
