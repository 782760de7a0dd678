#include "biomoe/data/byte_source.h"

#include <fcntl.h>
#include <htslib/bgzf.h>
#include <htslib/hfile.h>
#include <htslib/hts_log.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zstd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <tuple>
#include <vector>

#include "biomoe/core/descriptor.h"
#include "biomoe/core/error.h"

namespace biomoe {
namespace {

constexpr std::string_view kGzipMagic("\x1f\x8b", 2);
constexpr std::string_view kZstdMagic("\x28\xb5\x2f\xfd", 4);
constexpr int kBgzfCompression = 2;  // what bgzf_compression() says of blocked gzip

struct CloseFile {
  void operator()(hFILE* file) const { hclose_abruptly(file); }
};
using FileHandle = std::unique_ptr<hFILE, CloseFile>;

class PlainSource : public ByteSource {
 public:
  PlainSource(FileHandle file, const std::string& path) : ByteSource(path), file_(std::move(file)) {}
  size_t read(char* out, size_t capacity) override {
    const ssize_t got = hread(file_.get(), out, capacity);
    if (got < 0) throw user_error("{}: cannot read: {}", name(), std::strerror(herrno(file_.get())));
    return static_cast<size_t>(got);
  }

 private:
  FileHandle file_;
};

class GzipSource : public ByteSource {
 public:
  GzipSource(FileHandle file, const std::string& path) : ByteSource(path) {
    hts_set_log_level(HTS_LOG_OFF);  // errors are reported here, as one line
    bgzf_ = bgzf_hopen(file.get(), "r");
    if (bgzf_ == nullptr) throw user_error("{}: the gzip header is damaged", path);
    file.release();  // NOLINT: owned by bgzf_ from here on
    std::string fault;
    if (bgzf_compression(bgzf_) == 0) fault = "the gzip header is truncated or damaged";
    // A file cut between two blocks is valid gzip; the empty last block is there to tell.
    if (bgzf_compression(bgzf_) == kBgzfCompression && bgzf_check_EOF(bgzf_) == 0)
      fault = "the BGZF end marker is missing: the file is truncated; copy it again or compress it anew";
    if (fault.empty()) return;
    bgzf_close(bgzf_);
    throw user_error("{}: {}", path, fault);
  }
  ~GzipSource() override { bgzf_close(bgzf_); }
  size_t read(char* out, size_t capacity) override {
    const ssize_t got = bgzf_read(bgzf_, out, capacity);
    if (got < 0)
      throw user_error(
          "{}: the gzip data are truncated or damaged, or other bytes follow them; test it with gzip -t",
          name());
    return static_cast<size_t>(got);
  }

 private:
  BGZF* bgzf_ = nullptr;
};

class ZstdSource : public ByteSource {
 public:
  ZstdSource(FileHandle file, const std::string& path)
      : ByteSource(path),
        file_(std::move(file)),
        stream_(ZSTD_createDStream()),
        input_(ZSTD_DStreamInSize()) {
    if (!stream_) throw failure("{}: no memory for zstd", path);
  }
  size_t read(char* out, size_t capacity) override {
    ZSTD_outBuffer target{out, capacity, 0};
    while (target.pos == 0) {
      if (consumed_ == filled_ && !refill()) {
        if (!at_frame_end_) throw user_error("{}: the zstd data are truncated", name());
        return 0;
      }
      ZSTD_inBuffer source{input_.data(), filled_, consumed_};
      const size_t result = ZSTD_decompressStream(stream_.get(), &target, &source);
      if (ZSTD_isError(result))
        throw user_error("{}: the zstd data are damaged ({})", name(), ZSTD_getErrorName(result));
      consumed_ = source.pos;
      at_frame_end_ = result == 0;
    }
    return target.pos;
  }

 private:
  struct FreeStream {
    void operator()(ZSTD_DStream* stream) const { ZSTD_freeDStream(stream); }
  };
  bool refill() {
    const ssize_t got = hread(file_.get(), input_.data(), input_.size());
    if (got < 0) throw user_error("{}: cannot read: {}", name(), std::strerror(herrno(file_.get())));
    consumed_ = 0;
    filled_ = static_cast<size_t>(got);
    return filled_ > 0;
  }

  FileHandle file_;
  std::unique_ptr<ZSTD_DStream, FreeStream> stream_;
  std::vector<char> input_;
  size_t consumed_ = 0;
  size_t filled_ = 0;
  bool at_frame_end_ = false;
};

class MemorySource : public ByteSource {
 public:
  MemorySource(std::string_view bytes, std::string name) : ByteSource(std::move(name)), rest_(bytes) {}
  size_t read(char* out, size_t capacity) override {
    const size_t count = std::min(capacity, rest_.size());
    std::copy_n(rest_.data(), count, out);
    rest_.remove_prefix(count);
    return count;
  }

 private:
  std::string_view rest_;
};

// A file on a disk that must not change while it is read: of one that is cut short or still being written, a
// part would pass for the whole.
class UnchangedSource : public ByteSource {
 public:
  UnchangedSource(std::unique_ptr<ByteSource> inner, Descriptor file)
      : ByteSource(inner->name()), inner_(std::move(inner)), file_(std::move(file)), before_(state()) {}
  size_t read(char* out, size_t capacity) override {
    const size_t got = inner_->read(out, capacity);
    if (got == 0 && state() != before_)
      throw user_error("{}: the file changed while it was read; run this again once it is complete", name());
    return got;
  }

 private:
  // Size and time of the last change.
  std::tuple<off_t, time_t, long> state() const {
    struct stat info {};
    if (fstat(file_.get(), &info) != 0) throw user_error("{}: cannot read: {}", name(), std::strerror(errno));
    return {info.st_size, info.st_mtim.tv_sec, info.st_mtim.tv_nsec};
  }

  std::unique_ptr<ByteSource> inner_;
  Descriptor file_;
  std::tuple<off_t, time_t, long> before_;
};

Descriptor open_file(const std::string& path) {
  Descriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file) throw user_error("{}: cannot open: {}", path, std::strerror(errno));
  struct stat info {};
  if (fstat(file.get(), &info) != 0) throw user_error("{}: {}", path, std::strerror(errno));
  if (S_ISDIR(info.st_mode))
    throw user_error("{}: a directory, not a file; name its files, or use a glob such as DIR/*.fa", path);
  return file;
}

bool is_regular(const Descriptor& file) {
  struct stat info {};
  return fstat(file.get(), &info) == 0 && S_ISREG(info.st_mode);
}

FileHandle handle_of(const Descriptor& file, const std::string& path) {
  const int copy = fcntl(file.get(), F_DUPFD_CLOEXEC, 0);
  FileHandle handle(copy < 0 ? nullptr : hdopen(copy, "r"));
  if (handle) return handle;
  const int reason = errno;
  if (copy >= 0) close(copy);
  throw user_error("{}: {}", path, std::strerror(reason));
}

struct ForeignFormat {
  std::string_view magic;
  std::string_view name;
};
constexpr std::array kForeignFormats{ForeignFormat{"BZh", "bzip2"},
                                     ForeignFormat{std::string_view("\xfd"
                                                                    "7zXZ",
                                                                    5),
                                                   "xz"},
                                     ForeignFormat{"PK\x03\x04", "zip"},
                                     ForeignFormat{"\x7f"
                                                   "ELF",
                                                   "a program"}};

std::unique_ptr<ByteSource> decompressed(FileHandle file, const std::string& path) {
  std::array<char, 8> buffer{};
  const ssize_t got = hpeek(file.get(), buffer.data(), buffer.size());
  if (got < 0) throw user_error("{}: cannot read: {}", path, std::strerror(herrno(file.get())));
  if (got == 0) throw user_error("{}: the file is empty (0 bytes)", path);
  const std::string_view head(buffer.data(), static_cast<size_t>(got));
  if (head.starts_with(kGzipMagic)) return std::make_unique<GzipSource>(std::move(file), path);
  if (head.starts_with(kZstdMagic)) return std::make_unique<ZstdSource>(std::move(file), path);
  for (const ForeignFormat& format : kForeignFormats)
    if (head.starts_with(format.magic))
      throw user_error("{}: {}, which is not read here; give plain text, gzip, bgzip or zstd", path,
                       format.name);
  for (const char* ending : {".gz", ".bgz", ".zst"})
    if (path.ends_with(ending))
      throw user_error("{}: named {} but the content is not compressed so; rename it or compress it", path,
                       ending);
  return std::make_unique<PlainSource>(std::move(file), path);
}

}  // namespace

std::unique_ptr<ByteSource> open_byte_source(const std::string& path) {
  Descriptor file = open_file(path);
  auto source = decompressed(handle_of(file, path), path);
  if (!is_regular(file)) return source;
  return std::make_unique<UnchangedSource>(std::move(source), std::move(file));
}

std::unique_ptr<ByteSource> memory_byte_source(std::string_view bytes, std::string name) {
  return std::make_unique<MemorySource>(bytes, std::move(name));
}

}  // namespace biomoe
