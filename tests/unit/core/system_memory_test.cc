#include "biomoe/core/system_memory.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "tests/test_folder.h"

namespace biomoe {
namespace {

namespace fs = std::filesystem;

class SystemMemory : public ::testing::Test {
 protected:
  void write(const std::string& name, const std::string& text) const {
    fs::create_directories((root_ / name).parent_path());
    root_.write(name, text);
  }
  uint64_t available() const { return available_memory(root_.path()); }
  test::TempFolder root_;
};

TEST_F(SystemMemory, NothingToldIsUnknown) {
  EXPECT_EQ(available(), kUnknownMemory);
}

TEST_F(SystemMemory, MemAvailableCounts) {
  write("proc/meminfo", "MemTotal:       100 kB\nMemFree: 1 kB\nMemAvailable:    64 kB\n");
  EXPECT_EQ(available(), 65536u);
}

TEST_F(SystemMemory, TheTightestGroupOfVersion2Counts) {
  write("proc/meminfo", "MemAvailable: 1000 kB\n");
  write("proc/self/cgroup", "0::/a/b\n");
  write("sys/fs/cgroup/a/memory.max", "5000\n");
  write("sys/fs/cgroup/a/memory.current", "4000\n");
  write("sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 1500\nactive_file 9\n");
  write("sys/fs/cgroup/a/b/memory.max", "max\n");
  write("sys/fs/cgroup/a/b/memory.current", "3000\n");
  EXPECT_EQ(available(), 2500u);  // 5000 - (4000 - 1500)
  write("sys/fs/cgroup/a/b/memory.max", "3100\n");
  EXPECT_EQ(available(), 100u);
  write("sys/fs/cgroup/a/b/memory.current", "4000\n");
  EXPECT_EQ(available(), 0u);
}

TEST_F(SystemMemory, Version1AndAContainersOwnRootCount) {
  write("proc/meminfo", "MemAvailable: 1000 kB\n");
  write("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/docker/outside\n0::/\n");
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9000\n");
  write("sys/fs/cgroup/memory/memory.usage_in_bytes", "5000\n");
  write("sys/fs/cgroup/memory/memory.stat", "inactive_file 7\ntotal_inactive_file 1000\n");
  EXPECT_EQ(available(), 5000u);
}

TEST_F(SystemMemory, OddFilesAreUnknown) {
  write("proc/meminfo", "MemAvailable\nMemAvailable: many kB\n");
  write("proc/self/cgroup", "nonsense\n0::\n\n:::\n");
  write("sys/fs/cgroup/memory.max", "12x\n");
  EXPECT_EQ(available(), kUnknownMemory);
}

TEST(ResidentMemory, GrowsWithWhatIsTouched) {
  const uint64_t before = resident_memory();
  ASSERT_GT(before, 0u);
  const std::vector<char> touched(size_t{64} << 20, 'x');
  EXPECT_GE(resident_memory(), before + touched.size() * 9 / 10);
  EXPECT_GT(available_memory(), 0u);
}

}  // namespace
}  // namespace biomoe
