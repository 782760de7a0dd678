#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "biomoe/core/rng.h"
#include "tests/unit/config/sample_config.h"

namespace biomoe {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

void expect_same(const SampleConfig& a, const SampleConfig& b) {
  EXPECT_EQ(a.steps, b.steps);
  EXPECT_EQ(a.lr, b.lr);
  EXPECT_EQ(a.shuffle, b.shuffle);
  EXPECT_EQ(a.name, b.name);
  EXPECT_EQ(a.head_dim, b.head_dim);
  EXPECT_EQ(a.clip, b.clip);
  EXPECT_EQ(a.note, b.note);
  EXPECT_EQ(a.checked, b.checked);
  EXPECT_EQ(a.dataset.path, b.dataset.path);
  EXPECT_EQ(a.dataset.betas, b.dataset.betas);
  EXPECT_EQ(a.dataset.max_seq_length, b.dataset.max_seq_length);
  EXPECT_EQ(a.dataset.colour, b.dataset.colour);
  EXPECT_EQ(a.dataset.inner.depth, b.dataset.inner.depth);
  EXPECT_EQ(a.dataset.inner.label, b.dataset.inner.label);
}

TEST(Print, YamlHasSectionsAndOrigins) {
  ConfigSource source;
  source.overrides = {"dataset.inner.depth=5"};
  const std::string text = to_yaml(resolve<SampleConfig>(load_config(source)));
  EXPECT_THAT(text,
              AllOf(HasSubstr("steps: 10   "), HasSubstr("# default\n"), HasSubstr("\ndataset:\n  path: []"),
                    HasSubstr("\n  inner:\n    depth: 5"), HasSubstr("# command line\n")));
}

TEST(Print, EveryStringSurvives) {
  for (const std::string& text : {std::string("plain"),
                                  std::string(""),
                                  std::string("null"),
                                  std::string("~"),
                                  std::string("true"),
                                  std::string("No"),
                                  std::string("on"),
                                  std::string("y"),
                                  std::string("12"),
                                  std::string("1e5"),
                                  std::string("0x1F"),
                                  std::string("1_000"),
                                  std::string("-"),
                                  std::string("- a"),
                                  std::string("a: b"),
                                  std::string("a #b"),
                                  std::string("#b"),
                                  std::string("*a"),
                                  std::string("&a"),
                                  std::string("!a"),
                                  std::string("[a, b]"),
                                  std::string("{a: b}"),
                                  std::string("'q'"),
                                  std::string("\"q\""),
                                  std::string("it's"),
                                  std::string("back\\slash"),
                                  std::string("two\nlines\n"),
                                  std::string("\ttab "),
                                  std::string(" lead"),
                                  std::string("\x01\x1b\x7f\r"),
                                  std::string(".5"),
                                  std::string("."),
                                  std::string(".inf"),
                                  std::string(".nan"),
                                  std::string("---"),
                                  std::string("..."),
                                  std::string("%x"),
                                  std::string("@x"),
                                  std::string("`x"),
                                  std::string("? x"),
                                  std::string("| x"),
                                  std::string("> x"),
                                  std::string("12:30:45"),
                                  std::string("2001-01-01"),
                                  std::string("<<"),
                                  std::string("="),
                                  std::string("\xc3\xa9\xe2\x82\xac"),
                                  std::string("\xef\xbb\xbf"),
                                  std::string("\xc2\x85\xe2\x80\xa8"),
                                  std::string("data/a b/*.fa.gz"),
                                  std::string("a,b"),
                                  std::string("None"),
                                  std::string("?!"),
                                  std::string(5000, 'x')}) {
    SampleConfig config;
    config.name = text;
    config.note = text;
    config.dataset.path = {text, "x", text};
    expect_same(from_yaml(to_yaml(config)), config);
  }
}

TEST(Print, EveryNumberSurvives) {
  const Rng rng(7, RngStream::kTest);
  for (uint64_t i = 0; i < 2000; ++i) {
    SampleConfig config;
    const double number = std::bit_cast<double>(rng.u64(2 * i));
    config.lr = std::isnormal(number) ? number : 0.0;
    config.clip = -config.lr;
    config.dataset.betas = {config.lr, 1e6, 0.1, 5e-324, std::numeric_limits<double>::max()};
    config.steps = static_cast<int64_t>(rng.u64(2 * i + 1));
    config.head_dim = -config.steps / 3;
    expect_same(from_yaml(to_yaml(config)), config);
  }
}

TEST(Print, AResolvedFileResolvesToItself) {
  const SampleConfig config =
      from_overrides({"note='null'", "clip=null", "dataset.colour=dark_blue", "name=a: b", "checked=true"});
  const std::string once = to_yaml(config);
  EXPECT_EQ(to_yaml(from_yaml(once)), once);
  const std::string with_origins = to_yaml(resolve<SampleConfig>(parse_yaml(once, "odd\nname # x.yaml")));
  expect_same(from_yaml(with_origins), config);
}

TEST(Print, TheReferenceListsEveryKey) {
  const std::string text = config_reference<SampleConfig>();
  EXPECT_THAT(text,
              HasSubstr("## Top level\n\n| key | type | default | meaning |\n| --- | --- | --- | --- |\n"
                        "| `steps` | integer | `10` | optimiser steps |\n"));
  EXPECT_THAT(text, HasSubstr("| `checked` | true, false or null | `null` | yes, no or not said |\n"));
  EXPECT_THAT(text, HasSubstr("\n## `dataset`\n"));
  EXPECT_THAT(text, HasSubstr("| `betas` | list of numbers | `[0.9, 0.95]` | decay rates |\n"));
  EXPECT_THAT(text, HasSubstr("| `colour` | red, green or dark_blue | `red` | a colour |\n"));
  EXPECT_THAT(text, HasSubstr("\n## `dataset.inner`\n"));
  EXPECT_THAT(text, HasSubstr("| `depth` | integer | `2` | levels \\| of something |\n"));
}

struct SplitSection {
  InnerSample a, b;
  int64_t late = 0;
  template <typename Visitor>
  void visit(Visitor& v) {
    v.section("a", a);
    v.field("late", late, "");
    v.section("b", b);
  }
};

TEST(Print, FieldsAfterASectionStayAtTheTop) {
  SplitSection config;
  config.late = 3;
  config.b.depth = 9;
  const auto again = resolve<SplitSection>(parse_yaml(to_yaml(config), "a.yaml")).value;
  EXPECT_EQ(again.late, 3);
  EXPECT_EQ(again.b.depth, 9);
  EXPECT_EQ(again.a.depth, 2);
}

}  // namespace
}  // namespace biomoe
