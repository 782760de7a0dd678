#include "biomoe/core/file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "biomoe/core/descriptor.h"
#include "biomoe/core/error.h"
#include "tests/test_folder.h"

namespace biomoe {
namespace {

namespace fs = std::filesystem;

class File : public ::testing::Test {
 protected:
  template <typename Action>
  static Error error_of(Action action) {
    try {
      action();
    } catch (const Error& error) {
      return error;
    }
    ADD_FAILURE() << "no error was thrown";
    return Error(ErrorKind::kFailure, "");
  }

  const test::TempFolder folder_;
};

TEST_F(File, BytesComeBackAsTheyWere) {
  std::string bytes;
  for (int i = 0; i < 100'000; ++i) bytes += static_cast<char>(i * 7 + i / 256);
  write_file_synced(folder_ / "a", bytes);
  EXPECT_EQ(read_file(folder_ / "a"), bytes);
  write_file_synced(folder_ / "a", "short");
  EXPECT_EQ(read_file(folder_ / "a"), "short") << "what was longer is cut";
  write_file_synced(folder_ / "a", "");
  EXPECT_EQ(read_file(folder_ / "a"), "");
}

TEST_F(File, WhatIsNoReadableFileIsTheUsersError) {
  write_file_synced(folder_ / "big", "12345");
  EXPECT_EQ(read_file(folder_ / "big", 5), "12345");
  for (const Error& error :
       {error_of([&] { read_file(folder_ / "none"); }), error_of([&] { read_file(folder_.path()); }),
        error_of([&] { read_file("/dev/null"); }), error_of([&] { read_file(folder_ / "big", 4); })}) {
    EXPECT_EQ(error.kind(), ErrorKind::kUser) << error.what();
  }
  EXPECT_NE(std::string(error_of([&] { read_file(folder_ / "none"); }).what()).find("none: "),
            std::string::npos);
}

TEST_F(File, ReplacingIsARenameAndLeavesNothingBehind) {
  write_file_synced(folder_ / "a", "old");
  fs::create_hard_link(folder_ / "a", folder_ / "old");
  replace_file(folder_ / "a", "new");
  EXPECT_EQ(read_file(folder_ / "a"), "new");
  EXPECT_EQ(read_file(folder_ / "old"), "old") << "the old file was written over";
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_.path()), fs::directory_iterator()), 2);
}

TEST_F(File, FailedWritesNameThePathAndLeaveTheOldFile) {
  const Error missing = error_of([&] { write_file_synced(folder_ / "none/a", "x"); });
  EXPECT_EQ(missing.kind(), ErrorKind::kFailure);
  EXPECT_NE(std::string(missing.what()).find("none/a: "), std::string::npos);
  EXPECT_EQ(error_of([&] { sync_folder(folder_ / "none"); }).kind(), ErrorKind::kFailure);
  fs::create_directory(folder_ / "taken");
  EXPECT_EQ(error_of([&] { replace_file(folder_ / "taken", "x"); }).kind(), ErrorKind::kFailure);
  if (fs::exists("/dev/full")) {
    EXPECT_EQ(error_of([&] { write_file_synced("/dev/full", "x"); }).kind(), ErrorKind::kFailure);
  }
}

TEST_F(File, ReplacingFollowsNothing) {
  write_file_synced(folder_ / "target", "precious");
  fs::create_symlink("target", folder_ / "link");
  ASSERT_EQ(mkfifo((folder_ / "pipe").c_str(), 0600), 0);  // which nobody reads
  for (const char* name : {"link", "pipe"}) {
    replace_file(folder_ / name, "new");
    EXPECT_TRUE(fs::is_regular_file(fs::symlink_status(folder_ / name))) << name;
    EXPECT_EQ(read_file(folder_ / name), "new");
  }
  EXPECT_EQ(read_file(folder_ / "target"), "precious");
}

TEST_F(File, AnOutputThatIsNoRegularFileIsWrittenToAndStays) {
  write_file_synced(folder_ / "target", "a longer text");
  fs::create_symlink("target", folder_ / "link");
  write_output(folder_ / "link", "new");
  EXPECT_TRUE(fs::is_symlink(folder_ / "link"));
  EXPECT_EQ(read_file(folder_ / "target"), "new");
  ASSERT_EQ(mkfifo((folder_ / "pipe").c_str(), 0600), 0);
  require_creatable(folder_ / "pipe");
  const Descriptor reader(open((folder_ / "pipe").c_str(), O_RDONLY | O_NONBLOCK));
  write_output(folder_ / "pipe", "through");
  EXPECT_TRUE(fs::is_fifo(folder_ / "pipe"));
  std::string got(7, ' ');
  EXPECT_EQ(read(reader.get(), got.data(), got.size()), 7);
  EXPECT_EQ(got, "through");
  require_creatable("/dev/null");
  write_output("/dev/null", "x");
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
}

TEST_F(File, TheTemporaryHasANameOfItsOwnAndGoesAfterAFailure) {
  write_file_synced(folder_ / "a.tmp", "the user's");
  replace_file(folder_ / "a", "new");
  EXPECT_EQ(read_file(folder_ / "a.tmp"), "the user's");
  fs::create_directory(folder_ / "taken");
  EXPECT_EQ(error_of([&] { replace_file(folder_ / "taken", "x"); }).kind(), ErrorKind::kFailure);
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_.path()), fs::directory_iterator()), 3);
}

TEST_F(File, AnInputIsNoOutput) {
  const std::string input = folder_.write("in", "x");
  fs::create_symlink("in", folder_ / "link");
  require_not_an_input(folder_ / "new", {input, ""});
  for (const char* name : {"in", "link", "./in"})
    EXPECT_EQ(error_of([&] { require_not_an_input(folder_ / name, {"", input}); }).kind(), ErrorKind::kUser);
}

TEST_F(File, AFileThatCannotBeMadeIsKnownBefore) {
  require_creatable(folder_ / "new");
  EXPECT_FALSE(fs::exists(folder_ / "new"));
  write_file_synced(folder_ / "a", "old");
  require_creatable(folder_ / "a");
  EXPECT_EQ(read_file(folder_ / "a"), "old");
  for (const char* name : {"none/a", "a/b", "."}) {
    const Error error = error_of([&] { require_creatable(folder_ / name); });
    EXPECT_EQ(error.kind(), ErrorKind::kUser) << name;
    EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
  }
}

TEST(ErrorText, ChecksNameConditionAndPlace) {
  try {
    const int three = 3;
    BM_CHECK(three == 4, "{} experts", three);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kFailure);
    const std::string message = error.what();
    EXPECT_EQ(message.rfind("3 experts (check `three == 4` failed at ", 0), 0u) << message;
    EXPECT_NE(message.find("file_test.cc:"), std::string::npos) << message;
  }
}

}  // namespace
}  // namespace biomoe
