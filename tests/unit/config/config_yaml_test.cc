#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>

#include "tests/unit/config/sample_config.h"

namespace biomoe {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::StartsWith;

std::string parse_message(const std::string& text) {
  return user_message([&] { parse_yaml(text, "a.yaml"); });
}

TEST(YamlReader, BrokenYamlIsOneLineWithItsPlace) {
  EXPECT_THAT(parse_message("a: 1\nb: [1, 2\nc: 3\n"), MatchesRegex("a\\.yaml:[0-9]+: not valid YAML: .*"));
  EXPECT_THAT(parse_message("a: 1\n\tb: 2\n"), StartsWith("a.yaml:2: not valid YAML"));
  EXPECT_THAT(parse_message("a: 'unfinished"), HasSubstr("not valid YAML"));
  EXPECT_THAT(parse_message("a: *nowhere"), HasSubstr("not valid YAML"));
}

TEST(YamlReader, TheTopIsOneMap) {
  EXPECT_THAT(parse_message("- a\n- b\n"), HasSubstr("'key: value' lines are expected"));
  EXPECT_THAT(parse_message("just words"), HasSubstr("'key: value' lines are expected"));
  EXPECT_THAT(parse_message("a: 1\n---\nb: 2\n"), HasSubstr("more than one YAML document"));
}

TEST(YamlReader, DuplicateKeysNameBothLines) {
  EXPECT_THAT(parse_message("a: 1\nb: 2\na: 3\n"),
              AllOf(StartsWith("a.yaml:3: 'a': given twice"), HasSubstr("line 1")));
  EXPECT_THAT(parse_message("s:\n  x: 1\n  'x': 2\n"), HasSubstr("a.yaml:3: 'x': given twice"));
}

TEST(YamlReader, KeysArePlainNames) {
  EXPECT_THAT(parse_message("[a]: 1"), HasSubstr("a key that is not a plain name"));
  EXPECT_THAT(parse_message("{a: 1}: 1"), HasSubstr("a key that is not a plain name"));
  EXPECT_THAT(parse_message("null: 1"), HasSubstr("a key that is not a plain name"));
  EXPECT_THAT(parse_message("a: &x {b: 1}\nc:\n  <<: *x\n"), HasSubstr("merge keys"));
}

TEST(YamlReader, TagsOtherThanStrAreRefused) {
  EXPECT_THAT(parse_message("a: !!int 3"), HasSubstr("tag"));
  EXPECT_THAT(parse_message("a: !custom 3"), HasSubstr("tag"));
  EXPECT_THAT(parse_message("a: !!python/object {b: 1}"), HasSubstr("tag"));
}

TEST(YamlReader, AliasesAreWrittenOutAndKeepTheirLine) {
  const ConfigNode tree = parse_yaml("a: &x [1, 2]\nb: *x\n", "a.yaml");
  ASSERT_EQ(tree.find("b")->items.size(), 2u);
  EXPECT_EQ(tree.find("b")->items[1].text, "2");
  EXPECT_EQ(tree.find("b")->origin.line, 2);
  EXPECT_THAT(parse_message("a: &x [1, *x]"), HasSubstr("alias inside the node that it names"));
}

TEST(YamlReader, AliasBombsStopAtTheLimit) {
  std::string bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n";
  for (int i = 1; i < 12; ++i) {
    const std::string last = fmt::format("*a{}", i - 1);
    bomb += fmt::format("a{0}: &a{0} [{1}", i, last);
    for (int j = 0; j < 9; ++j) bomb += ", " + last;
    bomb += "]\n";
  }
  const auto start = std::chrono::steady_clock::now();
  EXPECT_THAT(parse_message(bomb), HasSubstr("once aliases are written out"));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(2));

  std::string long_text = "a: &a " + std::string(500'000, 'x') + "\nb: [*a";
  for (int j = 0; j < 50; ++j) long_text += ", *a";
  EXPECT_THAT(parse_message(long_text + "]\n"), HasSubstr("bytes of text once aliases are written out"));
}

TEST(YamlReader, DepthAndSizeHaveLimits) {
  EXPECT_THAT(parse_message("a: " + std::string(100'000, '[')), HasSubstr("levels inside each other"));
  std::string nested;
  for (int i = 0; i < 40; ++i) nested += std::string(static_cast<size_t>(i), ' ') + "k:\n";
  EXPECT_THAT(parse_message(nested), HasSubstr("levels inside each other"));
  std::string through_aliases = "a0: &a0 [1]\n";
  for (int i = 1; i < 30; ++i) {
    through_aliases += fmt::format("a{0}: &a{0} [*a{1}]\n", i, i - 1);
  }
  EXPECT_THAT(parse_message(through_aliases), HasSubstr("levels inside each other"));
  EXPECT_THAT(parse_message(std::string(kMaxConfigBytes + 1, '#')), HasSubstr("more than the"));
  std::string many = "a: [";
  for (int64_t i = 0; i <= kMaxConfigNodes; ++i) many += "1, ";
  EXPECT_THAT(parse_message(many + "1]"), HasSubstr("more than 20000 values"));
}

TEST(YamlReader, BytesThatAreNotTextAreRefused) {
  EXPECT_THAT(parse_message("a: \xff\xfe"), HasSubstr("not UTF-8"));
  EXPECT_THAT(parse_message(std::string("a: b\0c", 6)), HasSubstr("not UTF-8"));
  EXPECT_THAT(parse_message("a: \xed\xa0\x80"), HasSubstr("not UTF-8")) << "a surrogate";
  EXPECT_THAT(parse_message("a: \xc0\xaf"), HasSubstr("not UTF-8")) << "an overlong form";
  EXPECT_THAT(parse_message("a: \"x\\0y\""), HasSubstr("NUL"));
  EXPECT_EQ(parse_yaml("a: \xc3\xa9\xe2\x82\xac\xf0\x9f\xa7\xac", "a.yaml").find("a")->text,
            "\xc3\xa9\xe2\x82\xac\xf0\x9f\xa7\xac");
}

TEST(YamlReader, AMissingFileIsNamed) {
  EXPECT_THAT(user_message([] { read_yaml_file("/nonexistent/x.yaml"); }),
              AllOf(HasSubstr("/nonexistent/x.yaml"), HasSubstr("No such file")));
  EXPECT_THAT(user_message([] { read_yaml_file("/"); }), HasSubstr("not a regular file"));
}

}  // namespace
}  // namespace biomoe
