#include "biomoe/checkpoint/safetensors.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <tuple>
#include <utility>

#include "biomoe/checkpoint/convert.h"
#include "biomoe/checkpoint/json_text.h"
#include "biomoe/checkpoint/safetensors_header.h"
#include "biomoe/core/descriptor.h"
#include "biomoe/core/error.h"

namespace biomoe {
namespace {

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the limit of the reference implementation
constexpr uint64_t kBlockBytes = uint64_t{16} << 20;

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian");

}  // namespace

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) : name_(path.string()) {
  const Descriptor file = open_regular_file(path);
  struct stat info {};
  if (fstat(file.get(), &info) != 0) throw user_error("{}: cannot stat: {}", name_, std::strerror(errno));
  size_ = static_cast<uint64_t>(info.st_size);
  if (size_ < kLengthBytes) throw user_error("{}: {} bytes are too few for a safetensors file", name_, size_);
  void* memory = mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.get(), 0);
  if (memory == MAP_FAILED) throw failure("{}: cannot map: {}", name_, std::strerror(errno));
  data_ = static_cast<const uint8_t*>(memory);
  mapped_ = true;
  try {
    parse();
  } catch (...) {
    munmap(memory, size_);
    throw;
  }
}

SafetensorsFile SafetensorsFile::from_bytes(std::span<const uint8_t> bytes, std::string name) {
  SafetensorsFile file;
  file.name_ = std::move(name);
  file.data_ = bytes.data();
  file.size_ = bytes.size();
  if (file.size_ < kLengthBytes) {
    throw user_error("{}: {} bytes are too few for a safetensors file", file.name_, file.size_);
  }
  file.parse();
  return file;
}

SafetensorsFile::~SafetensorsFile() {
  if (mapped_) munmap(const_cast<uint8_t*>(data_), size_);
}

SafetensorsFile::SafetensorsFile(SafetensorsFile&& other) noexcept
    : name_(std::move(other.name_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)),
      data_start_(std::exchange(other.data_start_, 0)),
      mapped_(std::exchange(other.mapped_, false)),
      entries_(std::move(other.entries_)),
      by_name_(std::move(other.by_name_)),
      metadata_(std::move(other.metadata_)) {}

SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&& other) noexcept {
  std::swap(name_, other.name_);
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(data_start_, other.data_start_);
  std::swap(mapped_, other.mapped_);
  std::swap(entries_, other.entries_);
  std::swap(by_name_, other.by_name_);
  std::swap(metadata_, other.metadata_);
  return *this;
}

void SafetensorsFile::parse() {
  uint64_t length = 0;
  std::memcpy(&length, data_, kLengthBytes);
  if (length > kMaxHeaderBytes) {
    throw user_error("{}: a header of {} bytes is above the limit of {}; is this a safetensors file?", name_,
                     length, kMaxHeaderBytes);
  }
  if (length > size_ - kLengthBytes) {
    throw user_error("{}: truncated: the header needs {} bytes, the file has {}", name_,
                     length + kLengthBytes, size_);
  }
  data_start_ = kLengthBytes + length;
  const std::string_view text(reinterpret_cast<const char*>(data_) + kLengthBytes, length);
  if (text.empty() || text.front() != '{')
    throw user_error("{}: the safetensors header does not start with '{{'", name_);
  SafetensorsHeader header = parse_safetensors_header(text, name_);
  entries_ = std::move(header.entries);
  metadata_ = std::move(header.metadata);
  check_layout();
}

void SafetensorsFile::check_layout() {
  std::sort(entries_.begin(), entries_.end(), [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
    return std::tie(a.begin, a.bytes) < std::tie(b.begin, b.bytes);
  });
  // Ends first: a truncated download should be called truncated, whatever else it is.
  for (const auto& entry : entries_) {
    if (entry.begin > data_bytes() || entry.bytes > data_bytes() - entry.begin) {
      throw user_error("{}: truncated: tensor {} ends at byte {} of the data, the file holds {}", name_,
                       quote(entry.name), entry.begin + entry.bytes, data_bytes());
    }
  }
  uint64_t covered = 0;
  const SafetensorsEntry* before = nullptr;
  for (const auto& entry : entries_) {
    if (entry.begin < covered) {
      throw user_error("{}: tensor {} overlaps {}", name_, quote(entry.name), quote(before->name));
    }
    if (entry.begin > covered) {
      throw user_error("{}: {} bytes before tensor {} belong to no tensor", name_, entry.begin - covered,
                       quote(entry.name));
    }
    covered = entry.begin + entry.bytes;
    before = &entry;
  }
  if (covered != data_bytes()) {
    throw user_error("{}: {} bytes after the last tensor belong to no tensor", name_, data_bytes() - covered);
  }
  for (size_t i = 0; i < entries_.size(); ++i) by_name_.emplace(entries_[i].name, i);
}

const SafetensorsEntry* SafetensorsFile::find(std::string_view tensor) const {
  const auto found = by_name_.find(tensor);
  return found == by_name_.end() ? nullptr : &entries_[found->second];
}

const SafetensorsEntry& SafetensorsFile::at(std::string_view tensor) const {
  const SafetensorsEntry* entry = find(tensor);
  if (!entry) throw user_error("{}: there is no tensor {}", name_, quote(tensor));
  return *entry;
}

std::span<const uint8_t> SafetensorsFile::bytes(const SafetensorsEntry& entry) const {
  return {data_ + data_start_ + entry.begin, entry.bytes};
}

TensorView SafetensorsFile::view(std::string_view tensor) const {
  const SafetensorsEntry& entry = at(tensor);
  const uint8_t* start = bytes(entry).data();
  if (reinterpret_cast<uintptr_t>(start) % dtype_size(entry.dtype) != 0) {
    throw user_error("{}: tensor {} is not aligned to its {} elements", name_, quote(tensor),
                     dtype_name(entry.dtype));
  }
  return TensorView(const_cast<uint8_t*>(start), entry.dtype, entry.shape);
}

void SafetensorsFile::read(const SafetensorsEntry& entry, void* destination) const {
  read_part(entry, 0, entry.bytes, destination);
}

void SafetensorsFile::read_part(const SafetensorsEntry& entry, uint64_t begin, uint64_t count,
                                void* destination) const {
  BM_CHECK(begin <= entry.bytes && count <= entry.bytes - begin, "{}: bytes {} to {} of the {} of {}", name_,
           begin, begin + count, entry.bytes, quote(entry.name));
  const auto source = bytes(entry).subspan(begin, count);
  for (uint64_t done = 0; done < source.size(); done += kBlockBytes) {
    const uint64_t block = std::min(kBlockBytes, source.size() - done);
    std::memcpy(static_cast<uint8_t*>(destination) + done, source.data() + done, block);
    forget_pages(entry.begin + begin + done, block);
  }
}

void SafetensorsFile::read_f32(const SafetensorsEntry& entry, float* destination) const {
  read_f32_part(entry, 0, entry.num_elements(), destination);
}

void SafetensorsFile::read_f32_part(const SafetensorsEntry& entry, int64_t begin, int64_t count,
                                    float* destination) const {
  if (!is_float_type(entry.dtype)) {
    throw user_error("{}: tensor {} is {}; weights are F32, BF16 or F16", name_, quote(entry.name),
                     dtype_name(entry.dtype));
  }
  BM_CHECK(begin >= 0 && count >= 0 && begin + count <= entry.num_elements(),
           "{}: elements {} to {} of the {} of {}", name_, begin, begin + count, entry.num_elements(),
           quote(entry.name));
  const size_t element = dtype_size(entry.dtype);
  const uint64_t skipped = static_cast<uint64_t>(begin) * element;
  const auto source = bytes(entry).subspan(skipped, static_cast<uint64_t>(count) * element);
  for (uint64_t done = 0; done < source.size(); done += kBlockBytes) {
    const uint64_t block = std::min(kBlockBytes, source.size() - done);
    convert_to_f32(entry.dtype, source.data() + done, destination + done / element, block / element);
    forget_pages(entry.begin + skipped + done, block);
  }
}

void SafetensorsFile::forget_pages(uint64_t begin, uint64_t count) const {
  if (!mapped_) return;
  // Neighbours on the first and last page are read from the page cache again if they are wanted.
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t first = (data_start_ + begin) / page * page;
  madvise(const_cast<uint8_t*>(data_) + first, data_start_ + begin + count - first, MADV_DONTNEED);
}

}  // namespace biomoe
