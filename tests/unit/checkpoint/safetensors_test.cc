#include "biomoe/checkpoint/safetensors.h"

#include <sys/stat.h>
#include <zlib.h>

#include <cstring>

#include "biomoe/checkpoint/safetensors_writer.h"
#include "checkpoint_test_util.h"

namespace biomoe {
namespace {

using testing::error_of;
using testing::expect_error;
using testing::read_bytes;
using testing::safetensors_bytes;
using testing::TempFolder;
using testing::write_bytes;

SafetensorsFile parse(const std::string& bytes) {
  return SafetensorsFile::from_bytes({reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()},
                                     "file.safetensors");
}

std::string parse_error(const std::string& header, size_t data_bytes) {
  return error_of([&] { parse(safetensors_bytes(header, data_bytes)); });
}

TEST(Safetensors, WritesWhatItReads) {
  const TempFolder folder;
  const std::vector<float> f32 = {1.5f, -2.0f, 3.0f, 4.0f, 5.0f, 6.0f};
  const std::vector<uint16_t> bf16 = {bf16_from_float(0.5f), bf16_from_float(-7.0f)};
  const std::vector<int64_t> i64 = {int64_t{1} << 40};
  const std::vector<TensorSpec> specs = {{"z", DType::kI64, {1}},
                                         {"m.\"odd\"\n", DType::kF32, {2, 3}},
                                         {"scalar", DType::kF32, {}},
                                         {"a", DType::kBF16, {2}},
                                         {"empty", DType::kF16, {0, 5}}};
  SafetensorsWriter writer(folder / "x.safetensors", specs, {{"format", "pt"}});
  writer.write(i64.data(), 8);
  writer.write(f32.data(), 10);  // pieces need not end with an element
  writer.write(reinterpret_cast<const char*>(f32.data()) + 10, 14);
  const float scalar = 9.0f;
  writer.write(&scalar, 4);
  writer.write(bf16.data(), 4);
  const FileDigest digest = writer.finish();

  const std::string bytes = read_bytes(folder / "x.safetensors");
  EXPECT_EQ(digest.bytes, bytes.size());
  EXPECT_EQ(digest.crc32, crc32_z(0, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
  EXPECT_EQ(digest_file(folder / "x.safetensors"), digest);

  const SafetensorsFile file(folder / "x.safetensors");
  ASSERT_EQ(file.entries().size(), 5u);
  EXPECT_EQ(file.metadata().at("format"), "pt");
  EXPECT_EQ(file.view("m.\"odd\"\n").shape, (Shape{2, 3}));
  EXPECT_EQ(std::memcmp(file.view("m.\"odd\"\n").f32(), f32.data(), 24), 0);
  EXPECT_EQ(file.view("z").i64()[0], int64_t{1} << 40);
  EXPECT_EQ(file.view("scalar").f32()[0], 9.0f);
  EXPECT_EQ(file.at("empty").bytes, 0u);
  std::vector<float> converted(2);
  file.read_f32(file.at("a"), converted.data());
  EXPECT_EQ(converted, (std::vector<float>{0.5f, -7.0f}));
  expect_error([&] { file.read_f32(file.at("z"), converted.data()); }, "tensor 'z' is I64");
  expect_error([&] { file.at("nothing"); }, "no tensor 'nothing'");
}

TEST(Safetensors, EmptyFileOfNoTensorsIsLegal) {
  EXPECT_TRUE(parse(safetensors_bytes("{}", 0)).entries().empty());
  EXPECT_TRUE(parse(safetensors_bytes("{}      ", 0)).entries().empty());
}

TEST(Safetensors, MovesKeepTheMapping) {
  const TempFolder folder;
  write_bytes(folder / "x", safetensors_bytes(R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}})", 3));
  SafetensorsFile first(folder / "x");
  SafetensorsFile second(std::move(first));
  std::vector<SafetensorsFile> files;
  files.push_back(std::move(second));
  files.emplace_back(folder / "x");
  EXPECT_EQ(files[0].bytes(files[0].at("a"))[2], 1);
}

TEST(Safetensors, LargeTensorsAreReadInBlocks) {
  const TempFolder folder;
  const size_t count = (size_t{40} << 20) / 2 + 3;  // more than two blocks, and an odd rest
  std::vector<uint16_t> data(count);
  for (size_t i = 0; i < count; ++i) data[i] = bf16_from_float(static_cast<float>(i % 251));
  const TensorSpec spec{"x", DType::kBF16, {static_cast<int64_t>(count)}};
  SafetensorsWriter writer(folder / "x", {spec});
  writer.write(data.data(), spec.bytes());
  writer.finish();
  const SafetensorsFile file(folder / "x");
  std::vector<float> values(count);
  std::vector<uint16_t> raw(count);
  for (int round = 0; round < 2; ++round) {  // pages handed back must come again
    file.read_f32(file.at("x"), values.data());
    file.read(file.at("x"), raw.data());
    EXPECT_EQ(raw, data);
    for (size_t i = 0; i < count; ++i) ASSERT_EQ(values[i], static_cast<float>(i % 251)) << i;
    values.assign(count, -1.0f);
    raw.assign(count, 0);
  }
}

TEST(Safetensors, RefusesDamagedContainers) {
  const std::string good = safetensors_bytes(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 8);
  EXPECT_EQ(parse(good).entries().size(), 1u);
  for (size_t size = 0; size < good.size(); ++size) {
    EXPECT_NE(error_of([&] { parse(good.substr(0, size)); }), "") << "cut to " << size;
  }
  expect_error([&] { parse(good + "x"); }, "1 bytes after the last tensor");
  std::string huge = good;
  const uint64_t length = ~uint64_t{0};
  std::memcpy(huge.data(), &length, 8);
  expect_error([&] { parse(huge); }, "above the limit");
  expect_error([&] { parse(safetensors_bytes("  {}", 0)); }, "does not start with '{'");
  expect_error([&] { parse(safetensors_bytes(std::string(1, '\0'), 0)); }, "does not start");
  expect_error([&] { parse(safetensors_bytes("{} x", 0)); }, "not valid JSON");
  expect_error([&] { parse(safetensors_bytes("{\"\xff\":1}", 0)); }, "not valid JSON");
}

TEST(Safetensors, RefusesHeadersOfAnotherForm) {
  const std::string deep = "{\"a\":" + std::string(1'000'000, '[');
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"({"a":1})", "tensor 'a': a number where"},
      {R"({"a":null})", "tensor 'a': null"},
      {R"({"a":[]})", "tensor 'a': a list"},
      {deep, "tensor 'a': a list"},
      {R"({"a":{"dtype":{}}})", "an object where"},
      {R"({"a":{}})", "is missing"},
      {R"({"a":{"dtype":"F32","shape":[1]}})", "is missing"},
      {R"({"a":{"dtype":"F32","data_offsets":[0,4]}})", "is missing"},
      {R"({"a":{"shape":[1],"data_offsets":[0,4]}})", "is missing"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0]}})", "is missing"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4,8]}})", "more than two"},
      {R"({"a":{"dtype":"F4","shape":[1],"data_offsets":[0,4]}})", "unknown dtype 'F4'"},
      {R"({"a":{"dtype":7,"shape":[1],"data_offsets":[0,4]}})", "a number where"},
      {R"({"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", "a negative number"},
      {R"({"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}})", "a fraction"},
      {R"({"a":{"dtype":"F32","shape":["1"],"data_offsets":[0,4]}})", "text where"},
      {R"({"a":{"dtype":"F32","shape":[[1]],"data_offsets":[0,4]}})", "a list where"},
      {R"({"a":{"dtype":"F32","shape":[1,1,1,1,1],"data_offsets":[0,4]}})", "more than 4 axes"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1}})", "unknown key 'x'"},
      {R"({"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}})", "'dtype' is given twice"},
      {R"({"__metadata__":{"k":1}})", "tensor '__metadata__': a number"},
      {R"({"__metadata__":{"k":{}}})", "an object where"},
      {R"({"__metadata__":{"k":"1","k":"2"}})", "given twice"}};
  for (const auto& [header, what] : cases) {
    const std::string message = parse_error(header, 4);
    EXPECT_NE(message.find(what), std::string::npos) << header.substr(0, 100) << " -> " << message;
    EXPECT_NE(message.find("file.safetensors"), std::string::npos) << message;
  }
}

TEST(Safetensors, RefusesSizesThatDoNotFit) {
  const auto tensor = [](const std::string& name, const std::string& shape, const std::string& offsets) {
    return "\"" + name + R"(":{"dtype":"F32","shape":[)" + shape + R"(],"data_offsets":[)" + offsets + "]}";
  };
  const std::vector<std::tuple<std::string, size_t, std::string>> cases = {
      {tensor("a", "2", "0,4"), 4, "needs 8 bytes"},
      {tensor("a", "1", "8,4"), 8, "run backwards"},
      {tensor("a", "4294967296,4294967296", "0,0"), 0, "overflows 64 bits"},
      {tensor("a", "4611686018427387904", "0,0"), 0, "overflows 64 bits"},
      {tensor("a", "9223372036854775808", "0,0"), 0, "an axis of"},
      {tensor("a", "4611686018427387904,4611686018427387904,0", "0,0"), 0, "overflows 64 bits"},
      {tensor("a", "2", "18446744073709551608,18446744073709551616"), 8, "a fraction"},
      {tensor("a", "2", "18446744073709551600,18446744073709551608"), 8, "truncated"},
      {tensor("a", "2", "0,8"), 4, "truncated: tensor 'a' ends at byte 8"},
      {tensor("a", "1", "4,8"), 8, "4 bytes before tensor 'a'"},
      {tensor("a", "1", "0,4") + "," + tensor("b", "1", "8,12"), 12, "4 bytes before tensor 'b'"},
      {tensor("a", "2", "0,8") + "," + tensor("b", "2", "4,12"), 12, "tensor 'b' overlaps 'a'"},
      {tensor("a", "1", "0,4") + "," + tensor("b", "1", "0,4"), 4, "overlaps"},
      {tensor("a", "1", "0,4") + "," + tensor("a", "1", "4,8"), 8, "tensor 'a': the name is given twice"},
      {tensor("a", "1", "0,4"), 5, "1 bytes after the last tensor"},
      {tensor("a", "1", "0,4") + "," + tensor("e", "0", "2,2"), 4, "overlaps"}};
  for (const auto& [header, bytes, what] : cases) {
    const std::string message = parse_error("{" + header + "}", bytes);
    EXPECT_NE(message.find(what), std::string::npos) << header << " -> " << message;
  }
}

TEST(Safetensors, NamesFromFilesStayOnOneLine) {
  const std::string message = parse_error(R"({"line\nbreak\u001b[31m":{}})", 0);
  EXPECT_NE(message.find("line\\x0abreak\\x1b[31m"), std::string::npos) << message;
  EXPECT_LT(parse_error("{\"" + std::string(100'000, 'x') + "\":{}}", 0).size(), 300u);
}

TEST(Safetensors, UnalignedTensorsAreReadButNotViewed) {
  const std::string bytes = safetensors_bytes(
      R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}})",
      5);
  const SafetensorsFile file = parse(bytes);
  float value = 0;
  file.read_f32(file.at("b"), &value);
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  EXPECT_EQ(bits, 0x01010101u);
  const bool aligned = reinterpret_cast<uintptr_t>(file.bytes(file.at("b")).data()) % 4 == 0;
  EXPECT_EQ(error_of([&] { file.view("b"); }).empty(), aligned);
}

TEST(Safetensors, RefusesWhatIsNoFile) {
  const TempFolder folder;
  expect_error([&] { SafetensorsFile(folder / "absent"); }, "cannot open");
  expect_error([&] { SafetensorsFile file(folder.path()); }, "not a regular file");
  ASSERT_EQ(mkfifo((folder / "pipe").c_str(), 0600), 0);
  expect_error([&] { SafetensorsFile(folder / "pipe"); }, "not a regular file");
  write_bytes(folder / "empty", "");
  expect_error([&] { SafetensorsFile(folder / "empty"); }, "0 bytes are too few");
}

TEST(Safetensors, WriterHoldsItsCallerToTheHeader) {
  const TempFolder folder;
  SafetensorsWriter writer(folder / "x", {{"a", DType::kF32, {2}}});
  const double more[2] = {};
  expect_error([&] { writer.write(more, 16); }, "more bytes than", ErrorKind::kFailure);
  writer.write(more, 4);
  expect_error([&] { writer.finish(); }, "bytes were written", ErrorKind::kFailure);
  expect_error([&] { SafetensorsFile(folder / "x"); }, "");
  expect_error([&] { SafetensorsWriter(folder / "x", {}); }, "cannot create", ErrorKind::kFailure);
  expect_error(
      [&] {
        SafetensorsWriter(folder / "y", {{"a", DType::kU8, {1}}, {"b", DType::kF32, {1}}});
      },
      "tensor b would not be aligned", ErrorKind::kFailure);
}

}  // namespace
}  // namespace biomoe
