// The safetensors container (github.com/huggingface/safetensors, "Format"): 8 bytes little-endian header
// length N, N bytes of JSON {name: {"dtype", "shape", "data_offsets": [begin, end)}, "__metadata__": {text:
// text}}, then the data, row-major and little-endian, which the tensors cover with no gap and no overlap.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "biomoe/core/tensor_view.h"

namespace biomoe {

struct SafetensorsEntry {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  uint64_t begin = 0;  // bytes from the start of the data
  uint64_t bytes = 0;
  int64_t num_elements() const { return shape.num_elements(); }
};

// A file, mapped read-only; everything in the header is checked before the constructor returns, so that a
// file that opens can be read anywhere. Opens no more than the mapping: the descriptor is closed. Move-only.
class SafetensorsFile {
 public:
  // user_error, one line with the file and the tensor: not a regular file, truncated, trailing bytes, a
  // header longer than the file or 100 MB, JSON of another form, unknown dtype, more than four axes, a size
  // beyond 64 bits or unequal to its offsets, an overlap, a gap, a name given twice.
  explicit SafetensorsFile(const std::filesystem::path& path);
  // The same over bytes in memory, which must outlive the object; `name` stands for the file in errors.
  static SafetensorsFile from_bytes(std::span<const uint8_t> bytes, std::string name);
  ~SafetensorsFile();
  SafetensorsFile(SafetensorsFile&& other) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&& other) noexcept;
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  const std::string& name() const { return name_; }
  const std::vector<SafetensorsEntry>& entries() const { return entries_; }  // in the order of their data
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  uint64_t data_bytes() const { return size_ - data_start_; }

  const SafetensorsEntry* find(std::string_view tensor) const;  // null when there is none
  const SafetensorsEntry& at(std::string_view tensor) const;    // user_error when there is none

  std::span<const uint8_t> bytes(const SafetensorsEntry& entry) const;
  // A window on the mapping: read-only memory, valid while this object lives. user_error when the tensor's
  // place in the file is not a multiple of its element size (legal, but then only read() and read_f32()
  // serve).
  TensorView view(std::string_view tensor) const;

  // Copies entry.bytes bytes. Pages are handed back to the system as they are read: memory stays bounded.
  void read(const SafetensorsEntry& entry, void* destination) const;
  // The same for the bytes [begin, begin + bytes) of the entry.
  void read_part(const SafetensorsEntry& entry, uint64_t begin, uint64_t bytes, void* destination) const;
  // Copies entry.num_elements() floats, converted from F32, BF16 or F16; user_error for other types.
  void read_f32(const SafetensorsEntry& entry, float* destination) const;
  // The same for the elements [begin, begin + count) of the entry.
  void read_f32_part(const SafetensorsEntry& entry, int64_t begin, int64_t count, float* destination) const;

 private:
  SafetensorsFile() = default;
  void parse();
  void check_layout();
  void forget_pages(uint64_t begin, uint64_t bytes) const;

  std::string name_;
  const uint8_t* data_ = nullptr;  // start of the file
  uint64_t size_ = 0;
  uint64_t data_start_ = 0;
  bool mapped_ = false;
  std::vector<SafetensorsEntry> entries_;
  std::unordered_map<std::string_view, size_t> by_name_;  // views of entries_[i].name
  std::map<std::string, std::string> metadata_;
};

}  // namespace biomoe
