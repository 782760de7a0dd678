// Shared by the tests of biomoe/data.
#pragma once

#include <atomic>
#include <filesystem>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "biomoe/data/sequence_reader.h"

#include <unistd.h>

namespace biomoe::test {

// Keeps what a reader reports.
struct Collected : SequenceSink {
  std::vector<std::string> names;
  std::vector<std::string> sequences;
  int64_t ended = 0;
  void begin_record(std::string_view name) override {
    names.emplace_back(name);
    sequences.emplace_back();
  }
  void append(std::string_view symbols) override { sequences.back() += symbols; }
  void end_record() override { ++ended; }
};

// A folder of its own, removed at the end.
class TempFolder {
 public:
  TempFolder() {
    static std::atomic<int> counter{0};
    path_ = std::filesystem::temp_directory_path() /
            ("biomoe_data_test_" + std::to_string(getpid()) + "_" + std::to_string(counter++));
    std::filesystem::create_directories(path_);
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }
  std::string write(const std::string& name, std::string_view bytes) const {
    const std::string file = (path_ / name).string();
    std::ofstream(file, std::ios::binary) << bytes;
    return file;
  }

 private:
  std::filesystem::path path_;
};

}  // namespace biomoe::test
