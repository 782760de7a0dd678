// Small file-system helpers whose failures carry the path and the system's reason.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace biomoe {

// The whole file as bytes. user_error when it is missing, not a regular file, unreadable, above `max_bytes`,
// or made shorter meanwhile.
std::string read_file(const std::filesystem::path& path, uint64_t max_bytes = uint64_t{1} << 32);

// Writes and fsyncs. Throws failure naming the path and the reason (a full disk, a lost permission).
void write_file_synced(const std::filesystem::path& path, std::string_view bytes);

// As write_file_synced, through a temporary file beside it (of a name that nothing has; gone after a failure)
// and a rename: readers see the old or the new, never half. The file takes the place of what is there, also
// of a link or a pipe, which is not followed: for files that the program keeps in a folder of its own.
void replace_file(const std::filesystem::path& path, std::string_view bytes);

// The same for a file that a user names: what is there and no regular file (a device, a pipe, a link) stays
// and is written to.
void write_output(const std::filesystem::path& path, std::string_view bytes);

// For a file that will be written after long work: user_error when its folder does not exist or cannot be
// written, or when the name is taken by a folder.
void require_creatable(const std::filesystem::path& path);

// user_error when `output` is the same file as one of `inputs`.
void require_not_an_input(const std::filesystem::path& output, const std::vector<std::string>& inputs);

// fsync of a folder, so that renames and creations in it survive a power loss.
void sync_folder(const std::filesystem::path& folder);

}  // namespace biomoe
