#include "biomoe/data/sequence_store.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "biomoe/core/descriptor.h"
#include "biomoe/core/error.h"

namespace biomoe {
namespace {

constexpr size_t kSpillChunkBytes = size_t{4} << 20;

// Bases in memory or in a mapping, never both.
struct Bases {
  GrowingBytes memory;
  void* mapping = nullptr;
  size_t mapped_bytes = 0;
};

class ConcatenatedStore : public SequenceStore {
 public:
  ConcatenatedStore(Bases bases, std::vector<int64_t> ends, std::string names, std::vector<int64_t> name_ends)
      : bases_(std::move(bases)),
        ends_(std::move(ends)),
        names_(std::move(names)),
        name_ends_(std::move(name_ends)) {}
  ~ConcatenatedStore() override {
    if (bases_.mapping != nullptr) munmap(bases_.mapping, bases_.mapped_bytes);
  }

  int64_t num_records() const override { return static_cast<int64_t>(ends_.size()); }
  std::string name(int64_t record) const override {
    const int64_t begin = start(name_ends_, record);
    return names_.substr(static_cast<size_t>(begin), static_cast<size_t>(name_ends_[index(record)] - begin));
  }
  int64_t length(int64_t record) const override { return ends_[index(record)] - start(ends_, record); }
  size_t memory_bytes() const override {
    return bases_.memory.size() + names_.capacity() +
           (ends_.capacity() + name_ends_.capacity()) * sizeof(int64_t);
  }
  void read(int64_t record, int64_t begin, int64_t count, uint8_t* out) const override {
    const int64_t size = length(record);
    BM_CHECK(begin >= 0 && count >= 0 && begin <= size && count <= size - begin,
             "bases [{}, {} + {}) of record {}, which has {}", begin, begin, count, record, size);
    if (count == 0) return;
    const char* data =
        bases_.mapping != nullptr ? static_cast<const char*>(bases_.mapping) : bases_.memory.data();
    std::memcpy(out, data + start(ends_, record) + begin, static_cast<size_t>(count));
  }

 private:
  size_t index(int64_t record) const {
    BM_CHECK(record >= 0 && record < num_records(), "record {} of {}", record, num_records());
    return static_cast<size_t>(record);
  }
  int64_t start(const std::vector<int64_t>& ends, int64_t record) const {
    const size_t i = index(record);
    return i == 0 ? 0 : ends[i - 1];
  }

  Bases bases_;
  std::vector<int64_t> ends_;
  std::string names_;
  std::vector<int64_t> name_ends_;
};

// Asked for only when it is needed: TMPDIR may name anything.
std::filesystem::path system_spill_folder() {
  std::error_code error;
  const std::filesystem::path folder = std::filesystem::temp_directory_path(error);
  if (!error) return folder;
  const char* given = std::getenv("TMPDIR");
  throw user_error(
      "TMPDIR={}: {}; bases that do not fit in memory go to a file there: set it to a folder with space",
      given ? given : "", error.message());
}

int open_spill_file(const std::filesystem::path& folder) {
  std::string name = (folder / "biomoe-bases-XXXXXX").string();
  const int fd = mkstemp(name.data());
  if (fd < 0) throw failure("{}: cannot make a temporary file: {}", folder.string(), std::strerror(errno));
  unlink(name.c_str());  // the descriptor keeps it; nothing is left behind, whatever happens
  return fd;
}

}  // namespace

StoreBuilder::StoreBuilder(StoreOptions options) : options_(std::move(options)) {}

StoreBuilder::~StoreBuilder() {
  if (spill_fd_ >= 0) close(spill_fd_);
}

void StoreBuilder::begin_record(std::string_view name) {
  names_ += name;
  name_ends_.push_back(static_cast<int64_t>(names_.size()));
}

void StoreBuilder::append(std::string_view symbols) {
  memory_.append(symbols);
  bases_ += static_cast<int64_t>(symbols.size());
  const bool over = bases_ > options_.memory_limit_bytes;
  if (over && (memory_.size() >= kSpillChunkBytes || spill_fd_ < 0)) flush_to_spill();
}

void StoreBuilder::end_record() {
  ends_.push_back(bases_);
}

void StoreBuilder::flush_to_spill() {
  if (options_.spill_folder.empty()) options_.spill_folder = system_spill_folder();
  if (spill_fd_ < 0) spill_fd_ = open_spill_file(options_.spill_folder);
  if (!write_all(spill_fd_, {memory_.data(), memory_.size()})) {
    throw failure("{}: cannot write the bases that exceed memory_limit_bytes={}: {}",
                  options_.spill_folder.string(), options_.memory_limit_bytes, std::strerror(errno));
  }
  if (memory_.size() > 2 * kSpillChunkBytes) memory_.free();
  memory_.clear();
}

std::unique_ptr<SequenceStore> StoreBuilder::finish() {
  BM_CHECK(ends_.size() == name_ends_.size(), "a store was finished inside a record");
  Bases bases;
  if (spill_fd_ >= 0) {
    flush_to_spill();
    bases.mapped_bytes = static_cast<size_t>(bases_);
    bases.mapping = mmap(nullptr, bases.mapped_bytes, PROT_READ, MAP_SHARED, spill_fd_, 0);
    if (bases.mapping == MAP_FAILED) throw failure("cannot map {} bases: {}", bases_, std::strerror(errno));
    close(spill_fd_);
    spill_fd_ = -1;
    memory_.free();
  } else {
    bases.memory = std::move(memory_);
  }
  auto store = std::make_unique<ConcatenatedStore>(std::move(bases), std::move(ends_), std::move(names_),
                                                   std::move(name_ends_));
  memory_.free();
  ends_.clear();
  names_.clear();
  name_ends_.clear();
  bases_ = 0;
  return store;
}

}  // namespace biomoe
