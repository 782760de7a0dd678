// CRC-32 (ISO 3309, as gzip and PNG use it) of files and streams. zlib's, because htslib already brings zlib
// on every system the project builds on, and because `crc32` and `python -m zlib` can check a file by hand.
// It guards against damage (torn writes, bad disks and cables), not against somebody who wants to deceive.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>

namespace biomoe {

struct FileDigest {
  uint64_t bytes = 0;
  uint32_t crc32 = 0;
  bool operator==(const FileDigest&) const = default;
};

// Appends `bytes` bytes to a running checksum; start with 0.
uint32_t crc32_update(uint32_t crc, const void* data, size_t bytes);

// The checksum of two stretches of bytes, one after the other, from those of each.
uint32_t crc32_joined(uint32_t first, uint32_t second, uint64_t second_bytes);

// Reads the file in blocks of 1 MiB. user_error when it is not a regular file or cannot be read.
FileDigest digest_file(const std::filesystem::path& path);

// Eight lower-case hexadecimal digits.
std::string crc32_text(uint32_t crc);

}  // namespace biomoe
