#include "biomoe/checkpoint/tensor_index.h"

#include <cstring>
#include <nlohmann/json.hpp>

#include "checkpoint_test_util.h"

namespace biomoe {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::error_of;
using testing::expect_error;
using testing::read_bytes;
using testing::replace_text;
using testing::TempFolder;
using testing::write_bytes;

const std::vector<TensorSpec> kSpecs = {
    {"a", DType::kF32, {4}}, {"b", DType::kF32, {2, 2}}, {"c", DType::kF32, {8}}};

std::map<std::string, FileDigest> write_example(const fs::path& folder, uint64_t max_shard_bytes) {
  const std::vector<float> values = testing::random_floats(16, 1);
  const size_t begin[] = {0, 4, 8};
  const auto source = [&](size_t i, SafetensorsWriter& writer) {
    writer.write(values.data() + begin[i], kSpecs[i].bytes());
  };
  return write_tensors(folder, kSpecs, source, {.max_shard_bytes = max_shard_bytes});
}

// A folder of two shards: a and b in the first, c in the second.
class TensorFolderTest : public ::testing::Test {
 protected:
  void SetUp() override { write_example(folder_.path(), 32); }
  void expect_refused(const std::string& what) {
    expect_error([&] { TensorFolder opened(folder_.path()); }, what);
  }
  fs::path index() const { return folder_ / "model.safetensors.index.json"; }
  const std::string first_ = "model-00001-of-00002.safetensors";
  const std::string second_ = "model-00002-of-00002.safetensors";
  TempFolder folder_;
};

TEST_F(TensorFolderTest, ReadsShardsThroughTheIndex) {
  const TensorFolder opened(folder_.path());
  EXPECT_TRUE(opened.sharded());
  EXPECT_EQ(opened.total_bytes(), 64u);
  EXPECT_EQ(opened.total_elements(), 16);
  EXPECT_EQ(opened.file_names(), (std::vector<std::string>{first_, second_}));
  const std::vector<float> values = testing::random_floats(16, 1);
  EXPECT_EQ(std::memcmp(opened.find("c").file->bytes(*opened.find("c").entry).data(), values.data() + 8, 32),
            0);
  EXPECT_FALSE(opened.find("d"));
  const json written = json::parse(read_bytes(index()));
  EXPECT_EQ(written["metadata"]["total_size"], 64);
  EXPECT_EQ(written["weight_map"]["c"], second_);
}

TEST_F(TensorFolderTest, OneFileNeedsNoIndex) {
  const TempFolder other;
  const auto digests = write_example(other.path(), 1000);
  EXPECT_EQ(digests.size(), 1u);
  const TensorFolder opened(other.path());
  EXPECT_FALSE(opened.sharded());
  EXPECT_EQ(opened.tensors().size(), 3u);
}

TEST_F(TensorFolderTest, EachTensorLargerThanTheLimitGetsItsShard) {
  const TempFolder other;
  EXPECT_EQ(write_example(other.path(), 1).size(), 4u);
  EXPECT_EQ(TensorFolder(other.path()).tensors().size(), 3u);
}

TEST_F(TensorFolderTest, DigestsAreThoseOfTheFiles) {
  const TempFolder other;
  for (const auto& [name, digest] : write_example(other.path(), 16))
    EXPECT_EQ(digest_file(other / name), digest) << name;
}

TEST_F(TensorFolderTest, RefusesMissingShards) {
  fs::remove(folder_ / second_);
  expect_refused("the file 'model-00002-of-00002.safetensors' is missing");
}

TEST_F(TensorFolderTest, RefusesTruncatedShards) {
  fs::resize_file(folder_ / second_, fs::file_size(folder_ / second_) - 1);
  expect_refused("truncated: tensor 'c'");
}

TEST_F(TensorFolderTest, RefusesTensorsThatTheIndexMisplaces) {
  replace_text(index(), "\"b\": \"" + first_, "\"b\": \"" + second_);
  expect_refused("tensor 'b' should be in 'model-00002-of-00002.safetensors' and is in");
}

TEST_F(TensorFolderTest, RefusesTensorsThatNoShardHas) {
  replace_text(index(), "\"b\":", "\"d\":");
  expect_refused("tensor 'd' is in none of the shards");
}

TEST_F(TensorFolderTest, RefusesTensorsThatTheIndexLacks) {
  replace_text(index(), "\"b\": \"" + first_ + "\",", "");
  expect_refused("tensor 'b' is not in the index");
}

TEST_F(TensorFolderTest, RefusesTensorsInTwoShards) {
  fs::remove(folder_ / second_);
  fs::copy(folder_ / first_, folder_ / second_);
  expect_refused("is also in");
}

TEST_F(TensorFolderTest, RefusesShardsThatTheIndexDoesNotName) {
  fs::copy(folder_ / first_, folder_ / "model-00003-of-00003.safetensors");
  expect_refused("'model-00003-of-00003.safetensors' is not part of this checkpoint");
}

TEST_F(TensorFolderTest, OtherFilesMayLieBeside) {
  write_bytes(folder_ / "golden.safetensors", "anything");
  write_bytes(folder_ / "model-best.safetensors", "anything");
  EXPECT_EQ(error_of([&] { TensorFolder opened(folder_.path()); }), "");
}

TEST_F(TensorFolderTest, RefusesAWrongTotalSize) {
  replace_text(index(), "\"total_size\": 64", "\"total_size\": 65");
  expect_refused("metadata.total_size is 65, the tensors take 64 bytes");
  replace_text(index(), "\"total_size\": 65", "\"total_size\": -64");
  expect_refused("total_size is -64");
  replace_text(index(), "\"total_size\": -64", "\"total_size\": \"64\"");
  expect_refused("not a number");
  replace_text(index(), "\"total_size\": \"64\"", "\"total_size\": 64.0");
  EXPECT_EQ(error_of([&] { TensorFolder opened(folder_.path()); }), "");
}

TEST_F(TensorFolderTest, RefusesNamesThatLeaveTheFolder) {
  const TempFolder outside;
  fs::copy(folder_ / second_, outside / second_);
  const std::vector<std::string> names = {(outside / second_).string(),
                                          "../" + second_,
                                          "./" + second_,
                                          "..",
                                          ".",
                                          "",
                                          "sub/" + second_,
                                          "..\\\\x",
                                          "/etc/passwd",
                                          "x\\u0000.safetensors"};
  const std::string good = read_bytes(index());
  for (const auto& name : names) {
    write_bytes(index(), good);
    replace_text(index(), "\"c\": \"" + second_, "\"c\": \"" + name);
    expect_refused("is not the name of a file in the same folder");
  }
}

TEST_F(TensorFolderTest, RefusesLinksThatLeaveTheFolder) {
  const TempFolder outside;
  fs::rename(folder_ / second_, outside / second_);
  fs::create_symlink(outside / second_, folder_ / second_);
  expect_refused("is a link that leads out of the folder");
  fs::remove(folder_ / second_);
  fs::rename(outside / second_, folder_ / "blob");
  fs::create_symlink("blob", folder_ / second_);
  EXPECT_EQ(error_of([&] { TensorFolder opened(folder_.path()); }), "");
}

TEST_F(TensorFolderTest, ASingleFileMayNotBeALinkOutEither) {
  const TempFolder outside, other;
  write_example(outside.path(), 1000);
  fs::create_symlink(outside / "model.safetensors", other / "model.safetensors");
  expect_error([&] { TensorFolder opened(other.path()); }, "leads out of the folder");
}

TEST_F(TensorFolderTest, LinksOfTheHubCacheAreFollowed) {
  const TempFolder repo;
  fs::create_directories(repo / "blobs");
  fs::create_directories(repo / "snapshots/0123");
  for (const auto& entry : fs::directory_iterator(folder_.path())) {
    const std::string name = entry.path().filename().string();
    fs::copy(entry.path(), repo.path() / "blobs" / name);
    fs::create_symlink("../../blobs/" + name, repo.path() / "snapshots/0123" / name);
  }
  EXPECT_EQ(TensorFolder(repo / "snapshots/0123").tensors().size(), 3u);
  write_bytes(repo / "secret", "x");
  fs::remove(repo.path() / "snapshots/0123" / second_);
  fs::create_symlink("../../secret", repo.path() / "snapshots/0123" / second_);
  expect_error([&] { TensorFolder opened(repo / "snapshots/0123"); }, "leads out of the folder");
}

TEST_F(TensorFolderTest, RefusesIndexesOfAnotherForm) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"[]", "no weight_map"},
      {"{", "not valid JSON at byte"},
      {"{}", "no weight_map"},
      {R"({"weight_map": []})", "no weight_map"},
      {R"({"weight_map": {}})", "is empty"},
      {R"({"weight_map": {"a": 1}})", "the shard of 'a' is not a name"},
      {R"({"weight_map": {"a": "x", "a": "y"}})", "'a' is given twice"},
      {std::string(1000, '['), "nested deeper than"}};
  for (const auto& [text, what] : cases) {
    write_bytes(index(), text);
    expect_refused(what);
  }
}

TEST_F(TensorFolderTest, RefusesFoldersThatAreAmbiguousOrEmpty) {
  fs::copy(folder_ / first_, folder_ / "model.safetensors");
  expect_refused("holds both model.safetensors and model.safetensors.index.json");
  const TempFolder empty;
  expect_error([&] { TensorFolder opened(empty.path()); }, "neither model.safetensors nor");
  write_bytes(empty / "pytorch_model.bin", "x");
  expect_error([&] { TensorFolder opened(empty.path()); }, "save the model as safetensors");
  expect_error([&] { TensorFolder opened(empty / "absent"); }, "not a folder");
}

}  // namespace
}  // namespace biomoe
