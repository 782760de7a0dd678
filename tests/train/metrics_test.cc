#include "biomoe/train/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "biomoe/core/error.h"
#include "biomoe/core/file.h"
#include "biomoe/core/rng.h"
#include "tests/test_folder.h"

namespace biomoe {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;
using ::testing::HasSubstr;

class Metrics : public ::testing::Test {
 protected:
  std::string reopened(const std::string& text, int64_t last_step) {
    write_file_synced(path_, text);
    MetricsWriter writer(path_, last_step);
    return read_file(path_);
  }

  const test::TempFolder folder_;
  const fs::path path_ = folder_ / "metrics.jsonl";
};

TEST_F(Metrics, EachLineIsOnDiskWhenWriteReturns) {
  MetricsWriter writer(path_, 0);
  writer.write({{"step", 1}, {"loss", 1.5}, {"load", {{{"max", 3}}}}});
  EXPECT_EQ(read_file(path_), "{\"step\":1,\"loss\":1.5,\"load\":[{\"max\":3}]}\n");
  writer.write({{"step", 2}});
  EXPECT_EQ(read_file(path_), "{\"step\":1,\"loss\":1.5,\"load\":[{\"max\":3}]}\n{\"step\":2}\n");
}

TEST_F(Metrics, NumbersReadBackAsTheSameDouble) {
  const Rng rng(11, RngStream::kTest);
  std::vector<double> values{0.1, 1e22, 5e-324, -0.0, std::numeric_limits<double>::max(), 1.0 / 3};
  for (uint64_t i = 0; i < 500; ++i) {
    const double value = std::bit_cast<double>(rng.u64(i));
    if (std::isfinite(value)) values.push_back(value);
  }
  MetricsWriter(path_, 0).write({{"step", 1}, {"values", values}, {"tenth", 0.1}});
  const std::string text = read_file(path_);
  EXPECT_THAT(text, HasSubstr("\"tenth\":0.1}"));
  const auto read = Json::parse(text)["values"].get<std::vector<double>>();
  ASSERT_EQ(read.size(), values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(std::bit_cast<uint64_t>(read[i]), std::bit_cast<uint64_t>(values[i])) << values[i];
  }
}

TEST_F(Metrics, NonFiniteNumbersAreNullAndNamed) {
  const double inf = std::numeric_limits<double>::infinity();
  MetricsWriter(path_, 0).write(
      {{"step", 3}, {"loss", std::nan("")}, {"by_layer", {1.0, inf}}, {"part", {{"norm", -inf}}}});
  const Json line = Json::parse(read_file(path_));
  EXPECT_TRUE(line["loss"].is_null());
  EXPECT_TRUE(line["by_layer"][1].is_null());
  EXPECT_EQ(line["by_layer"][0], 1.0);
  const Json expected = {{"/loss", "nan"}, {"/by_layer/1", "inf"}, {"/part/norm", "-inf"}};
  EXPECT_EQ(line["nonfinite"], expected);
  for (const auto& place : line["nonfinite"].items()) {
    EXPECT_TRUE(line[Json::json_pointer(place.key())].is_null()) << place.key();
  }
}

TEST_F(Metrics, ResumingTakesOutLaterStepsAndATornEnd) {
  const std::string one = "{\"step\":1,\"loss\":2.0}\n", two = "{\"step\":2}\n", three = "{\"step\":3}\n";
  EXPECT_EQ(reopened(one + two + three, 2), one + two);
  EXPECT_EQ(reopened(one + two + three, 3), one + two + three);
  EXPECT_EQ(reopened(one + two + "{\"step\":3,\"lo", 9), one + two);
  EXPECT_EQ(reopened(one + two + "{\"step\":3}", 9), one + two) << "no newline: it may go on";
  EXPECT_EQ(reopened(one + std::string(100, '\0'), 9), one) << "blocks that never reached the disk";
  EXPECT_EQ(reopened(one + "{\"step\":2,\n\nx", 9), one);
  EXPECT_EQ(reopened(one + two, 0), "");
  EXPECT_EQ(reopened("", 5), "");
  EXPECT_EQ(reopened("garbage", 5), "");
}

TEST_F(Metrics, AnOldFileIsReplacedInOnePiece) {
  write_file_synced(path_, "{\"step\":1}\n{\"step\":2}\n");
  fs::create_hard_link(path_, folder_ / "old");
  MetricsWriter writer(path_, 1);
  EXPECT_EQ(read_file(folder_ / "old"), "{\"step\":1}\n{\"step\":2}\n")
      << "the old file is never cut in place";
  writer.write({{"step", 2}});
  EXPECT_EQ(read_file(path_), "{\"step\":1}\n{\"step\":2}\n");
  EXPECT_FALSE(fs::exists(folder_ / "metrics.jsonl.tmp"));
}

TEST_F(Metrics, DamageBeforeAGoodLineIsNotOurs) {
  for (const char* bad : {"not json", "{\"loss\":1}", "[1]", "{\"step\":\"1\"}", "{\"step\":1.5}", ""}) {
    const std::string text = std::string("{\"step\":1}\n").append(bad).append("\n{\"step\":2}\n");
    try {
      reopened(text, 9);
      FAIL() << "accepted: " << bad;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kUser);
      EXPECT_THAT(error.what(), HasSubstr("metrics.jsonl:2: "));
    }
    EXPECT_EQ(read_file(path_), text) << "what is not ours stays as it is";
  }
}

TEST_F(Metrics, FailuresNameTheFile) {
  EXPECT_THROW(MetricsWriter(folder_ / "none/metrics.jsonl", 0), Error);
  if (fs::exists("/dev/full")) {
    MetricsWriter writer(folder_ / "metrics.jsonl", 0);
    fs::remove(path_);
    fs::create_symlink("/dev/full", folder_ / "full");
    try {
      MetricsWriter full(folder_ / "full", 0);
      full.write({{"step", 1}});
      FAIL() << "a full disk went unnoticed";
    } catch (const Error& error) {
      EXPECT_THAT(error.what(), HasSubstr("full: "));
    }
  }
}

}  // namespace
}  // namespace biomoe
