// Small file-system helpers whose failures carry the path and the system's reason.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

namespace biomoe {

// The whole file as bytes. user_error when it is missing, not a regular file, unreadable, or above
// `max_bytes`.
std::string read_file(const std::filesystem::path& path, uint64_t max_bytes = uint64_t{1} << 32);

// Writes and fsyncs. Throws failure naming the path and the reason (a full disk, a lost permission).
void write_file_synced(const std::filesystem::path& path, std::string_view bytes);

// As write_file_synced, through a temporary file beside it and a rename: readers see the old or the new,
// never half.
void replace_file(const std::filesystem::path& path, std::string_view bytes);

// For a file that will be written after long work: user_error when its folder does not exist or cannot be
// written, or when the name is taken by something that is no file.
void require_creatable(const std::filesystem::path& path);

// fsync of a folder, so that renames and creations in it survive a power loss.
void sync_folder(const std::filesystem::path& folder);

}  // namespace biomoe
