#include "biomoe/train/tensorboard.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <map>
#include <string>

#include "biomoe/core/error.h"
#include "biomoe/core/file.h"
#include "tests/test_folder.h"

namespace biomoe {
namespace {

TEST(Crc32c, KnownValues) {
  // RFC 3720, appendix B.4, and the check value of the CRC catalogue.
  EXPECT_EQ(crc32c(""), 0u);
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43u);
  std::string up, down;
  for (int i = 0; i < 32; ++i) {
    up += static_cast<char>(i);
    down += static_cast<char>(31 - i);
  }
  EXPECT_EQ(crc32c(up), 0x46dd794eu);
  EXPECT_EQ(crc32c(down), 0x113fdb5cu);
}

// A second reading of the format, bit by bit, to hold against the writer.
uint32_t slow_crc32c(std::string_view bytes) {
  uint32_t crc = 0xffffffffu;
  for (const char c : bytes) {
    crc ^= static_cast<unsigned char>(c);
    for (int i = 0; i < 8; ++i) crc = crc & 1u ? (crc >> 1) ^ 0x82f63b78u : crc >> 1;
  }
  return crc ^ 0xffffffffu;
}

template <typename Word>
Word take(std::string_view& bytes) {
  Word word;
  EXPECT_GE(bytes.size(), sizeof word);
  std::memcpy(&word, bytes.data(), sizeof word);
  bytes.remove_prefix(sizeof word);
  return word;
}

uint64_t take_varint(std::string_view& bytes) {
  uint64_t value = 0;
  for (int shift = 0; !bytes.empty(); shift += 7) {
    const auto byte = static_cast<unsigned char>(bytes[0]);
    bytes.remove_prefix(1);
    value |= static_cast<uint64_t>(byte & 0x7fu) << shift;
    if (byte < 0x80) return value;
  }
  ADD_FAILURE() << "a varint is cut short";
  return value;
}

// A message as field number -> raw values (bytes of fixed fields, varints as 8 bytes).
std::multimap<uint64_t, std::string> fields_of(std::string_view message) {
  std::multimap<uint64_t, std::string> fields;
  while (!message.empty()) {
    const uint64_t key = take_varint(message);
    size_t length = 0;
    switch (key & 7u) {
      case 0: {
        const uint64_t value = take_varint(message);
        fields.emplace(key >> 3, std::string(reinterpret_cast<const char*>(&value), sizeof value));
        continue;
      }
      case 1:
        length = 8;
        break;
      case 2:
        length = take_varint(message);
        break;
      case 5:
        length = 4;
        break;
      default:
        ADD_FAILURE() << "wire type " << (key & 7u);
        return fields;
    }
    EXPECT_LE(length, message.size());
    fields.emplace(key >> 3, std::string(message.substr(0, length)));
    message.remove_prefix(std::min(length, message.size()));
  }
  return fields;
}

template <typename T>
T as(const std::string& bytes) {
  T value{};
  EXPECT_EQ(bytes.size(), sizeof value);
  std::memcpy(&value, bytes.data(), std::min(bytes.size(), sizeof value));
  return value;
}

std::vector<std::string> records_of(const std::string& file) {
  std::vector<std::string> records;
  std::string_view left = file;
  const auto masked = [](std::string_view bytes) {
    const uint32_t crc = slow_crc32c(bytes);
    return ((crc >> 15) | (crc << 17)) + 0xa282ead8u;
  };
  while (!left.empty()) {
    const std::string_view length_bytes = left.substr(0, 8);
    const auto length = take<uint64_t>(left);
    EXPECT_EQ(take<uint32_t>(left), masked(length_bytes));
    EXPECT_LE(length, left.size());
    records.emplace_back(left.substr(0, length));
    left.remove_prefix(length);
    EXPECT_EQ(take<uint32_t>(left), masked(records.back()));
  }
  return records;
}

TEST(Events, AFileReadsBackAsWhatWasWritten) {
  const test::TempFolder folder;
  std::string text;
  {
    EventWriter writer(folder.path(), 0);
    EXPECT_EQ(writer.path().filename().string().rfind("events.out.tfevents.", 0), 0u);
    writer.write(7, {{"loss", 1.25}, {"expert_load/0/max", 1e30}, {"odd", std::nan("")}});
    writer.write(int64_t{1} << 40, {});
    text = read_file(writer.path());  // before the writer is closed: nothing waits in a buffer
  }
  const auto records = records_of(text);
  ASSERT_EQ(records.size(), 3u);

  auto version = fields_of(records[0]);
  EXPECT_EQ(version.find(3)->second, "brain.Event:2");
  EXPECT_NEAR(as<double>(version.find(1)->second), static_cast<double>(time(nullptr)), 60.0);

  auto event = fields_of(records[1]);
  EXPECT_EQ(as<uint64_t>(event.find(2)->second), 7u);
  std::vector<std::pair<std::string, float>> values;
  auto summary = fields_of(event.find(5)->second);
  for (auto [value, end] = summary.equal_range(1); value != end; ++value) {
    auto parts = fields_of(value->second);
    values.emplace_back(parts.find(1)->second, as<float>(parts.find(2)->second));
  }
  ASSERT_EQ(values.size(), 3u);
  EXPECT_EQ(values[0], std::make_pair(std::string("loss"), 1.25f));
  EXPECT_EQ(values[1], std::make_pair(std::string("expert_load/0/max"), 1e30f));
  EXPECT_TRUE(std::isnan(values[2].second));

  EXPECT_EQ(as<uint64_t>(fields_of(records[2]).find(2)->second), uint64_t{1} << 40);
}

TEST(Events, AResumedRunTellsTensorBoardToForgetLaterSteps) {
  const test::TempFolder folder;
  const EventWriter writer(folder.path(), 30);
  const auto records = records_of(read_file(writer.path()));
  ASSERT_EQ(records.size(), 2u);
  auto event = fields_of(records[1]);
  EXPECT_EQ(as<uint64_t>(event.find(2)->second), 31u);
  auto session = fields_of(event.find(7)->second);
  EXPECT_EQ(as<uint64_t>(session.find(1)->second), 1u) << "SessionLog.START";
}

TEST(Events, FailuresNameTheFile) {
  const test::TempFolder folder;
  try {
    EventWriter writer(folder / "none", 0);
    FAIL() << "a missing folder went unnoticed";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("none/events.out.tfevents"), std::string::npos);
  }
}

TEST(Scalars, EveryNumberOfALineButTheStep) {
  const nlohmann::ordered_json line = {
      {"step", 5},      {"loss", 1.5},
      {"mfu", nullptr}, {"expert_load", {{{"max", 3}, {"min", 1}}, {{"max", 4}, {"min", 0}}}},
      {"note", "text"}, {"good", true}};
  std::map<std::string, double> tags;
  for (const Scalar& scalar : scalars_of(line)) tags[scalar.tag] = scalar.value;
  const std::map<std::string, double> expected{{"loss", 1.5},
                                               {"expert_load/0/max", 3},
                                               {"expert_load/0/min", 1},
                                               {"expert_load/1/max", 4},
                                               {"expert_load/1/min", 0}};
  EXPECT_EQ(tags, expected);
}

}  // namespace
}  // namespace biomoe
