// How much memory this process has and how much it can still get.
#pragma once

#include <cstdint>
#include <filesystem>
#include <limits>

namespace biomoe {

inline constexpr uint64_t kUnknownMemory = std::numeric_limits<uint64_t>::max();

// Bytes that can be used without swapping or being killed: the least of MemAvailable and what the limits of
// the control groups of this process (version 1 and 2, the group and those above it) leave, where pages of
// files that can be dropped count as free. kUnknownMemory where the system tells nothing. `root` is where
// proc/ and sys/ are found.
uint64_t available_memory(const std::filesystem::path& root = "/");

// Resident bytes of this process now; 0 where the system tells nothing.
uint64_t resident_memory();

}  // namespace biomoe
