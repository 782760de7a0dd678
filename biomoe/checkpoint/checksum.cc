#include "biomoe/checkpoint/checksum.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <cerrno>
#include <cstring>
#include <vector>

#include "biomoe/core/descriptor.h"
#include "biomoe/core/error.h"

namespace biomoe {

uint32_t crc32_update(uint32_t crc, const void* data, size_t bytes) {
  return static_cast<uint32_t>(::crc32_z(crc, static_cast<const Bytef*>(data), bytes));
}

uint32_t crc32_joined(uint32_t first, uint32_t second, uint64_t second_bytes) {
  return static_cast<uint32_t>(::crc32_combine(first, second, static_cast<z_off_t>(second_bytes)));
}

FileDigest digest_file(const std::filesystem::path& path) {
  const Descriptor file = open_regular_file(path);
  std::vector<char> block(size_t{1} << 20);
  FileDigest digest;
  for (;;) {
    const ssize_t got = read(file.get(), block.data(), block.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw user_error("{}: cannot read: {}", path.string(), std::strerror(errno));
    if (got == 0) return digest;
    digest.crc32 = crc32_update(digest.crc32, block.data(), static_cast<size_t>(got));
    digest.bytes += static_cast<uint64_t>(got);
  }
}

std::string crc32_text(uint32_t crc) {
  return fmt::format("{:08x}", crc);
}

}  // namespace biomoe
