#include "biomoe/config/overrides.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/unit/config/sample_config.h"

namespace biomoe {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(Overrides, ValuesOfEveryType) {
  const SampleConfig config = from_overrides({"steps=5", "lr=1e-2", "shuffle=false", "head_dim=8",
                                              "clip=null", "dataset.colour=green", "dataset.betas=[0.1,0.2]",
                                              "dataset.inner.depth=7", "dataset.path=[a, 'b,c' ,\"d]\"]"});
  EXPECT_EQ(config.steps, 5);
  EXPECT_EQ(config.lr, 1e-2);
  EXPECT_FALSE(config.shuffle);
  EXPECT_EQ(config.head_dim, 8);
  EXPECT_EQ(config.clip, std::nullopt);
  EXPECT_EQ(config.dataset.colour, Colour::kGreen);
  EXPECT_THAT(config.dataset.betas, ElementsAre(0.1, 0.2));
  EXPECT_EQ(config.dataset.inner.depth, 7);
  EXPECT_THAT(config.dataset.path, ElementsAre("a", "b,c", "d]"));
}

TEST(Overrides, TextIsTakenAsWritten) {
  const auto name = [](const std::string& value) { return from_overrides({"name=" + value}).name; };
  EXPECT_EQ(name("a=b=c"), "a=b=c");
  EXPECT_EQ(name("*.fa"), "*.fa");
  EXPECT_EQ(name("x: y # z"), "x: y # z");
  EXPECT_EQ(name("&a !b %c @d `e"), "&a !b %c @d `e");
  EXPECT_EQ(name("  padded "), "padded");
  EXPECT_EQ(name("' padded '"), " padded ");
  EXPECT_EQ(name("'it''s'"), "it's");
  EXPECT_EQ(name("\"a\\\"b\\\\c\\n\\t\""), "a\"b\\c\n\t");
  EXPECT_EQ(name("it's"), "it's");
  EXPECT_EQ(name(""), "");
  EXPECT_EQ(name("  \t "), "");
  EXPECT_EQ(name("'null'"), "null");
  EXPECT_EQ(name("C:\\x"), "C:\\x");
}

TEST(Overrides, ListsAndNull) {
  EXPECT_TRUE(from_overrides({"dataset.betas=[]"}).dataset.betas.empty());
  EXPECT_TRUE(from_overrides({"dataset.betas=[ ]"}).dataset.betas.empty());
  EXPECT_THAT(from_overrides({"dataset.path=data/*.fa"}).dataset.path, ElementsAre("data/*.fa"));
  EXPECT_EQ(from_overrides({"note=null"}).note, std::nullopt);
  EXPECT_EQ(from_overrides({"note='null'"}).note, "null");
  EXPECT_THAT(override_message("name=null"), HasSubstr("text is expected, not null"));
}

TEST(Overrides, AKeyIsGivenOnce) {
  ConfigNode config;
  config.kind = ConfigNode::Kind::kMap;
  EXPECT_THAT(
      [&] {
        apply_overrides(config, {"steps=1", "note=a", "steps=2"});
      },
      ::testing::ThrowsMessage<Error>(
          AllOf(StartsWith("command line: 'steps=2': "), HasSubstr("twice (first 'steps=1')"))));
}

TEST(Overrides, MalformedArgumentsSayWhatToWrite) {
  EXPECT_THAT(override_message("steps"),
              AllOf(StartsWith("command line: 'steps': "), HasSubstr("section.key=value")));
  EXPECT_THAT(override_message("=1"), HasSubstr("not a key"));
  EXPECT_THAT(override_message("a..b=1"), HasSubstr("not a key"));
  EXPECT_THAT(override_message(".a=1"), HasSubstr("not a key"));
  EXPECT_THAT(override_message("a.=1"), HasSubstr("not a key"));
  EXPECT_THAT(override_message("a b=1"), HasSubstr("not a key"));
  EXPECT_THAT(override_message("+steps=1"), HasSubstr("without '+'"));
  EXPECT_THAT(override_message("~steps=1"), HasSubstr("without '+'"));
  EXPECT_THAT(override_message("name='x"), HasSubstr("closing quote"));
  EXPECT_THAT(override_message("name='x'y"), HasSubstr("after the closing quote"));
  EXPECT_THAT(override_message("name=\"\\q\""), HasSubstr("unknown escape"));
  EXPECT_THAT(override_message("dataset={path: x}"), HasSubstr("a map is not a value"));
  EXPECT_THAT(override_message("dataset.betas=[1"), HasSubstr("closing ']'"));
  EXPECT_THAT(override_message("dataset.betas=[1,]"), HasSubstr("empty item"));
  EXPECT_THAT(override_message("dataset.betas=[1]x"), HasSubstr("after the closing"));
  EXPECT_THAT(override_message("dataset.betas=[[1]]"), HasSubstr("list inside a list"));
  EXPECT_THAT(override_message("dataset.path=['a' b]"), HasSubstr("comma"));
  EXPECT_THAT(override_message("name=\xff"), HasSubstr("not UTF-8"));
  std::string deep = "a";
  for (int i = 0; i < 100'000; ++i) deep += ".a";
  EXPECT_THAT(override_message(deep + "=1"), HasSubstr("too many dots"));
}

}  // namespace
}  // namespace biomoe
