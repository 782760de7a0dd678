#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/unit/config/sample_config.h"

namespace biomoe {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

TEST(Fields, EveryTypeIsReadFromYaml) {
  const SampleConfig config = from_yaml(R"(
steps: 2_000
lr: 1e-4
shuffle: false
name: ecoli
head_dim: 64
clip: null
note: some words
checked: false
dataset:
  path: [a.fa, "b c.fa"]
  betas: [0.5, 1, 2.5e-1]
  colour: dark_blue
  inner:
    depth: -3
)");
  EXPECT_EQ(config.steps, 2000);
  EXPECT_EQ(config.lr, 1e-4);
  EXPECT_FALSE(config.shuffle);
  EXPECT_EQ(config.name, "ecoli");
  EXPECT_EQ(config.head_dim, 64);
  EXPECT_EQ(config.clip, std::nullopt);
  EXPECT_EQ(config.note, "some words");
  EXPECT_EQ(config.checked, false);
  EXPECT_THAT(config.dataset.path, ElementsAre("a.fa", "b c.fa"));
  EXPECT_THAT(config.dataset.betas, ElementsAre(0.5, 1.0, 0.25));
  EXPECT_EQ(config.dataset.colour, Colour::kDarkBlue);
  EXPECT_EQ(config.dataset.inner.depth, -3);
  EXPECT_EQ(config.dataset.inner.label, "plain") << "a key that is not given keeps its default";
  EXPECT_EQ(config.dataset.max_seq_length, 1024);
}

TEST(Fields, AScalarStandsForAListOfOneAndNullForNone) {
  EXPECT_THAT(from_yaml("dataset: {path: x.fa}").dataset.path, ElementsAre("x.fa"));
  EXPECT_THAT(from_yaml("dataset: {betas: 0.5}").dataset.betas, ElementsAre(0.5));
  EXPECT_TRUE(from_yaml("dataset: {betas: null}").dataset.betas.empty());
  EXPECT_TRUE(from_yaml("dataset: {betas: []}").dataset.betas.empty());
}

TEST(Fields, AnEmptySectionOrFileSetsNothing) {
  EXPECT_EQ(from_yaml("dataset:\n  # all of it commented out\n").dataset.max_seq_length, 1024);
  EXPECT_EQ(from_yaml("").steps, 10);
  EXPECT_EQ(from_yaml("# only a comment\n---\n").steps, 10);
}

TEST(Fields, IntegersTakeDigitsOnly) {
  EXPECT_EQ(from_yaml("steps: +7").steps, 7);
  EXPECT_EQ(from_yaml("steps: 0").steps, 0);
  EXPECT_EQ(from_yaml("steps: -9223372036854775808").steps, std::numeric_limits<int64_t>::min());
  EXPECT_EQ(from_yaml("steps: 9_223_372_036_854_775_807").steps, std::numeric_limits<int64_t>::max());
  EXPECT_THAT(yaml_message("steps: 9223372036854775808"), HasSubstr("does not fit 64 bits"));
  EXPECT_THAT(yaml_message("steps: -9223372036854775809"), HasSubstr("does not fit 64 bits"));
  EXPECT_THAT(yaml_message("steps: 5e3"), HasSubstr("an integer is expected, not '5e3'; write 5000"));
  EXPECT_THAT(yaml_message("steps: 2.0"), HasSubstr("write 2"));
  EXPECT_THAT(yaml_message("steps: 007"), HasSubstr("write 7"));
  for (const char* text :
       {"2__000", "_2",  "2_",   "0x10", "1.5",   "1 000", "1,000", "true", "--1", "+-1",
        "1e",     "ten", ".inf", "+",    "1e400", "'5'",   "null",  "",     "[1]", "{a: 1}"}) {
    EXPECT_THAT(yaml_message("steps: " + std::string(text)),
                AllOf(StartsWith("a.yaml:1: steps: "), HasSubstr("an integer is expected")))
        << text;
  }
}

TEST(Fields, NumbersAreFiniteDecimals) {
  EXPECT_EQ(from_yaml("lr: 3").lr, 3.0);
  EXPECT_EQ(from_yaml("lr: -1_000.5").lr, -1000.5);
  EXPECT_EQ(from_yaml("lr: .5").lr, 0.5);
  EXPECT_EQ(from_yaml("lr: +2E+3").lr, 2000.0);
  for (const char* text : {"nan", ".nan", "NaN", "inf", "-inf", ".inf", "-.INF", "infinity"}) {
    EXPECT_THAT(yaml_message("lr: " + std::string(text)), HasSubstr("is not a finite number")) << text;
  }
  EXPECT_THAT(yaml_message("lr: 1e999"), HasSubstr("outside the range"));
  for (const char* text :
       {"1e-3x", "0x1p3", "1_e3", "abc", "1e", "--1", "'1'", "[]", "null", "true", "+", "."}) {
    EXPECT_THAT(yaml_message("lr: " + std::string(text)), HasSubstr("a number is expected")) << text;
  }
}

TEST(Fields, BooleansAreTrueOrFalse) {
  for (const char* text : {"true", "True", "TRUE"})
    EXPECT_TRUE(from_yaml("shuffle: " + std::string(text)).shuffle);
  for (const char* text : {"false", "False", "FALSE"})
    EXPECT_FALSE(from_yaml("shuffle: " + std::string(text)).shuffle);
  for (const char* text :
       {"yes", "no", "on", "off", "y", "n", "1", "0", "'true'", "null", "tRUE", "[true]"}) {
    EXPECT_THAT(yaml_message("shuffle: " + std::string(text)), HasSubstr("true or false is expected"))
        << text;
  }
}

TEST(Fields, TextIsTakenAsWritten) {
  EXPECT_EQ(from_yaml("name: 007").name, "007");
  EXPECT_EQ(from_yaml("name: yes").name, "yes");
  EXPECT_EQ(from_yaml("name: 'null'").name, "null");
  EXPECT_EQ(from_yaml("name: \"\"").name, "");
  EXPECT_EQ(from_yaml("note: \"null\"").note, "null");
  EXPECT_EQ(from_yaml("name: !!str 12").name, "12");
  EXPECT_EQ(from_yaml("name: |\n  two\n  lines\n").name, "two\nlines\n");
  EXPECT_THAT(yaml_message("name: null"), HasSubstr("text is expected, not null"));
  EXPECT_THAT(yaml_message("name: [a]"), HasSubstr("one value is expected"));
  EXPECT_THAT(yaml_message("name: ${oc.env:HOME}/x"), HasSubstr("interpolations are not supported"));
  EXPECT_THAT(yaml_message("dataset: {path: [a, '${x}']}"), HasSubstr("interpolations"));
}

TEST(Fields, UnknownKeysAreNamedWithPlaceAndSuggestion) {
  EXPECT_EQ(yaml_message("steps: 1\ndataset:\n  max_seq_len: 5\n"),
            "a.yaml:3: dataset.max_seq_len: unknown key; did you mean dataset.max_seq_length?");
  EXPECT_THAT(yaml_message("setps: 1"), HasSubstr("did you mean steps?"));
  EXPECT_THAT(yaml_message("max_seq_length: 1"), HasSubstr("did you mean dataset.max_seq_length?"));
  EXPECT_THAT(yaml_message("dataset: {inner: {quite_else: 1}}"),
              HasSubstr("unknown key; dataset.inner has depth, label"));
  EXPECT_THAT(yaml_message("dataset.max_seq_length: 1"), HasSubstr("nest it"));
  EXPECT_THAT(yaml_message("? \"\\n\\e\"\n: 1"), HasSubstr("unknown key"));
  EXPECT_THAT(override_message("dataset.inner.dept=1"),
              AllOf(StartsWith("command line: dataset.inner.dept: "), HasSubstr("dataset.inner.depth")));
}

TEST(Fields, ASectionIsNotAValueAndAValueNotASection) {
  EXPECT_THAT(yaml_message("dataset: 5"),
              HasSubstr("is a section, not a value; set one of its keys: path, betas"));
  EXPECT_THAT(yaml_message("dataset: [1]"), HasSubstr("is a section"));
  EXPECT_THAT(yaml_message("steps: {a: 1}"), HasSubstr("not a section"));
  EXPECT_THAT(override_message("steps.a=1"), HasSubstr("steps: an integer is expected, not a section"));
  EXPECT_THAT(yaml_message("dataset: {path: {a: 1}}"), HasSubstr("a list is expected, not a section"));
  EXPECT_THAT(yaml_message("dataset: {path: [[a]]}"), HasSubstr("not a list"));
}

TEST(Fields, ChoicesNameTheirValues) {
  EXPECT_THAT(yaml_message("dataset: {colour: dark_bleu}"),
              AllOf(HasSubstr("red, green or dark_blue is expected, not 'dark_bleu'"),
                    HasSubstr("did you mean dark_blue?")));
  EXPECT_THAT(yaml_message("dataset: {colour: 1}"),
              AllOf(HasSubstr("red, green"), Not(HasSubstr("did you"))));
  EXPECT_THAT(yaml_message("dataset: {colour: null}"), HasSubstr("not null"));
}

TEST(Fields, ChoicesOfTheCommandLineReadAsThoseOfTheConfiguration) {
  EXPECT_EQ(choice_of<Colour>("--colour", "dark_blue", kColourNames), Colour::kDarkBlue);
  EXPECT_EQ(user_message([] { choice_of<Colour>("--colour", "gren", kColourNames); }),
            "command line: --colour: red, green or dark_blue is expected, not 'gren'; did you mean green?");
}

TEST(Fields, HolesHaveToBeFilled) {
  EXPECT_THAT(yaml_message("steps: ???"), HasSubstr("steps: has to be given; add steps=VALUE"));
  EXPECT_THAT(yaml_message("dataset: {path: [\"?\?\?\"]}"), HasSubstr("dataset.path: has to be given"));
  SampleConfig defaults;
  defaults.name = "???";
  ConfigNode empty = parse_yaml("", "a.yaml");
  EXPECT_THAT(user_message([&] { resolve<SampleConfig>(empty, defaults); }),
              HasSubstr("default: name: has to be given"));
  ConfigNode tree = parse_yaml("name: given", "a.yaml");
  EXPECT_EQ(resolve<SampleConfig>(tree, defaults).value.name, "given");
}

struct TwiceDeclared {
  int64_t a = 0;
  template <typename Visitor>
  void visit(Visitor& v) {
    v.field("a", a, "");
    v.field("a", a, "");
  }
};

TEST(Fields, AKeyDeclaredTwiceIsABrokenProgram) {
  TwiceDeclared config;
  EXPECT_THROW(FieldList::of(config), Error);
}

}  // namespace
}  // namespace biomoe
