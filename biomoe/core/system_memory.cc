#include "biomoe/core/system_memory.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>

namespace biomoe {
namespace {

namespace fs = std::filesystem;

// The first word of a file as a number; nothing for "max", other text or no file.
std::optional<uint64_t> read_number(const fs::path& path) {
  std::ifstream file(path);
  std::string word;
  if (!(file >> word)) return std::nullopt;
  uint64_t value = 0;
  const auto [stop, error] = std::from_chars(word.data(), word.data() + word.size(), value);
  if (error != std::errc() || stop != word.data() + word.size()) return std::nullopt;
  return value;
}

// The number after `key` at the start of a line.
std::optional<uint64_t> read_entry(const fs::path& path, const std::string& key) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string name;
    uint64_t value = 0;
    if (words >> name >> value && name == key) return value;
  }
  return std::nullopt;
}

struct GroupFiles {
  fs::path mount;
  const char *limit, *usage, *droppable;
};

uint64_t left_in_group(const fs::path& folder, const GroupFiles& files) {
  const auto limit = read_number(folder / files.limit);
  const auto usage = read_number(folder / files.usage);
  if (!limit || !usage) return kUnknownMemory;
  const uint64_t droppable = read_entry(folder / "memory.stat", files.droppable).value_or(0);
  const uint64_t held = *usage - std::min(*usage, droppable);
  return *limit - std::min(*limit, held);
}

// `group` is the path that proc/self/cgroup names. Inside a container it may name a place outside the mount;
// the mount's own root is then the group.
uint64_t left_in_groups(const GroupFiles& files, const fs::path& group) {
  uint64_t left = left_in_group(files.mount, files);
  fs::path folder = files.mount;
  for (const auto& part : group.relative_path()) {
    folder /= part;
    left = std::min(left, left_in_group(folder, files));
  }
  return left;
}

}  // namespace

uint64_t available_memory(const fs::path& root) {
  uint64_t available = kUnknownMemory;
  if (const auto kib = read_entry(root / "proc/meminfo", "MemAvailable:")) available = *kib * 1024;
  std::ifstream groups(root / "proc/self/cgroup");
  std::string line;
  while (std::getline(groups, line)) {  // ID:CONTROLLERS:PATH, of version 2 "0::PATH"
    const size_t first = line.find(':');
    const size_t second = first == line.npos ? first : line.find(':', first + 1);
    if (second == line.npos) continue;
    const std::string controllers = fmt::format(",{},", line.substr(first + 1, second - first - 1));
    const fs::path group = line.substr(second + 1);
    const fs::path mount = root / "sys/fs/cgroup";
    if (controllers == ",,") {
      available = std::min(available,
                           left_in_groups({mount, "memory.max", "memory.current", "inactive_file"}, group));
    } else if (controllers.find(",memory,") != controllers.npos) {
      available = std::min(available, left_in_groups({mount / "memory", "memory.limit_in_bytes",
                                                      "memory.usage_in_bytes", "total_inactive_file"},
                                                     group));
    }
  }
  return available;
}

uint64_t resident_memory() {
  std::ifstream file("/proc/self/statm");
  uint64_t pages = 0, resident = 0;
  if (!(file >> pages >> resident)) return 0;
  return resident * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace biomoe
