#include "biomoe/data/sequence_store.h"

#include <gtest/gtest.h>

#include "biomoe/core/error.h"
#include "tests/unit/data/data_test_helpers.h"

namespace biomoe {
namespace {

using test::error_of;
using test::TempFolder;

std::string read_all(const SequenceStore& store, int64_t record) {
  std::string out(static_cast<size_t>(store.length(record)), '?');
  store.read(record, 0, store.length(record), reinterpret_cast<uint8_t*>(out.data()));
  return out;
}

void fill(StoreBuilder& builder, const std::vector<std::string>& records, size_t piece) {
  for (size_t r = 0; r < records.size(); ++r) {
    builder.begin_record(fmt::format("name {}", r));
    for (size_t i = 0; i < records[r].size(); i += piece)
      builder.append(std::string_view(records[r]).substr(i, piece));
    builder.end_record();
  }
}

TEST(SequenceStore, GivesBackWhatWasPutInWhereverItLives) {
  const TempFolder folder;
  const std::vector<std::string> records{"", "ACGTacgtN", "", std::string(5000, 'G') + "T", "C", ""};
  for (const int64_t limit : {int64_t{0}, int64_t{3}, int64_t{100}, int64_t{5011}, int64_t{1} << 30}) {
    StoreBuilder builder({.memory_limit_bytes = limit, .spill_folder = folder.path()});
    fill(builder, records, 7);
    EXPECT_EQ(builder.spilled(), limit < 5011) << limit;
    EXPECT_EQ(builder.num_bases(), 5011);
    const auto store = builder.finish();
    EXPECT_TRUE(std::filesystem::is_empty(folder.path()));  // the file has no name
    ASSERT_EQ(store->num_records(), 6);
    for (size_t r = 0; r < records.size(); ++r) {
      EXPECT_EQ(store->name(static_cast<int64_t>(r)), fmt::format("name {}", r));
      EXPECT_EQ(read_all(*store, static_cast<int64_t>(r)), records[r]) << limit << " " << r;
    }
    uint8_t two[2];
    store->read(1, 3, 2, two);
    EXPECT_EQ(two[0], 'T');
    EXPECT_EQ(two[1], 'a');
  }
}

TEST(SequenceStore, SpillsMoreThanOneChunk) {
  const TempFolder folder;
  std::string record(size_t{9} << 20, 'A');
  for (size_t i = 0; i < record.size(); ++i) record[i] = "ACGT"[(i * i / 7) % 4];
  StoreBuilder builder({.memory_limit_bytes = 1000, .spill_folder = folder.path()});
  fill(builder, {"CC", record}, size_t{1} << 18);
  EXPECT_EQ(read_all(*builder.finish(), 1), record);
}

TEST(SequenceStore, RefusesWhatIsOutside) {
  StoreBuilder builder;
  fill(builder, {"ACGT", "AC"}, 8);
  const auto store = builder.finish();
  uint8_t out[8];
  EXPECT_THROW(store->read(0, 0, 5, out), Error);
  EXPECT_THROW(store->read(0, 5, 0, out), Error);
  EXPECT_THROW(store->read(0, -1, 2, out), Error);
  EXPECT_THROW(store->read(0, 2, -1, out), Error);
  EXPECT_THROW(store->read(0, 2, INT64_MAX, out), Error);
  EXPECT_THROW(store->length(2), Error);
  EXPECT_THROW(store->name(-1), Error);
  EXPECT_NO_THROW(store->read(1, 2, 0, out));
}

TEST(SequenceStore, ASpillFolderThatIsNotThereIsNamed) {
  ErrorKind kind = ErrorKind::kUser;
  const std::string message = error_of(
      [] {
        StoreBuilder builder({.memory_limit_bytes = 1, .spill_folder = "/no/such/folder"});
        fill(builder, {"ACGT"}, 4);
      },
      &kind);
  EXPECT_TRUE(test::contains(message, "/no/such/folder")) << message;
  EXPECT_EQ(kind, ErrorKind::kFailure);
}

TEST(SequenceStore, TheSystemsFolderIsAskedForWhenItIsNeeded) {
  const char* given = std::getenv("TMPDIR");
  const std::string before = given ? given : "";
  setenv("TMPDIR", "/nonexistent", 1);
  StoreBuilder roomy;
  fill(roomy, {"ACGT"}, 4);
  ErrorKind kind = ErrorKind::kFailure;
  const std::string message = error_of(
      [] {
        StoreBuilder builder({.memory_limit_bytes = 1, .spill_folder = {}});
        fill(builder, {"ACGT"}, 4);
      },
      &kind);
  EXPECT_TRUE(test::contains(message, "TMPDIR=/nonexistent: ")) << message;
  EXPECT_EQ(kind, ErrorKind::kUser);
  given ? setenv("TMPDIR", before.c_str(), 1) : unsetenv("TMPDIR");
}

}  // namespace
}  // namespace biomoe
