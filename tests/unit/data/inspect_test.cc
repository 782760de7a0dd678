#include "biomoe/data/inspect.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/unit/data/data_test_helpers.h"

namespace biomoe {
namespace {

using nlohmann::json;
using test::contains;
using test::TempFolder;

json inspect(std::string_view text) {
  const TempFolder folder;
  return inspect_file(folder.write("x.fa", text));
}

bool warns(const json& inspection, std::string_view part) {
  return std::any_of(inspection["warnings"].begin(), inspection["warnings"].end(),
                     [&](const json& warning) { return contains(warning.get<std::string>(), part); });
}

TEST(Inspect, CountsEachSymbolAsItStands) {
  const json got = inspect(">a\nACGTUacgtuNnRr-\n");
  EXPECT_EQ(got["bases"], 15);
  EXPECT_EQ(got["soft_masked"], 7);
  EXPECT_EQ(got["degenerate"], 4);
  EXPECT_EQ(got["symbols"]["-"], 1);
  EXPECT_EQ(got["symbols"]["u"], 1);
  EXPECT_EQ(got.size(), 6u);
}

TEST(Inspect, WarningsNameTheRecord) {
  EXPECT_EQ(inspect(">a\nACGTRYKM*\n")["warnings"].size(), 1u);  // the stop is no nucleotide code
  EXPECT_EQ(inspect(">a\nACGTRYKMnN\n")["warnings"], json::array());
  EXPECT_TRUE(warns(inspect(">gap\nAC-.GT\n"), "'gap' holds 2 gap symbols"));
  EXPECT_TRUE(warns(inspect(">void\n>b\nAC\n"), "'void' is empty"));
  EXPECT_TRUE(warns(inspect(">n1\nNNnn\n>b\nAC\n"), "'n1' is nothing but N (4 bases)"));
  EXPECT_TRUE(warns(inspect(">b\nAC\n>\nAC\n"), "record 2 has no name"));
  EXPECT_TRUE(warns(inspect(">mix\nACTU\n"), "'mix' holds both T and U"));
  EXPECT_TRUE(warns(inspect(">odd\nACGTACGTACGTACGTACGTACGTX\n"), "'odd' holds 1 symbols"));
  const json twice = inspect(">d\nA\n>d x\nC\n>d\nG\n>e\nT\n");
  EXPECT_TRUE(warns(twice, "'d'"));
  EXPECT_EQ(twice["warnings"].size(), 1u);
}

TEST(Inspect, ProteinIsSaidOnce) {
  const json got = inspect(">p\nMKVLAAGIVGLCFEPQ*\n>q\nMEEPQSDPSVEPPLSQ\n");
  ASSERT_EQ(got["warnings"].size(), 1u);
  EXPECT_TRUE(warns(got, "tokenizer_name_or_path=protein"));
}

TEST(Inspect, WarningsAndTextAreBounded) {
  std::string text;
  for (int i = 0; i < 5000; ++i) text += ">\nAC-\n>r" + std::to_string(i) + "\n\n";
  const json got = inspect(text);
  EXPECT_EQ(got["records"].size(), 10000u);
  EXPECT_LE(got["warnings"].size(), 65u);
  EXPECT_TRUE(warns(got, "... and 4980 more like"));
  const std::string shown = render_inspection("x.fa", got);
  EXPECT_LE(std::count(shown.begin(), shown.end(), '\n'), 60);
  EXPECT_TRUE(contains(shown, "x.fa: 10000 records, 15000 bases"));
  EXPECT_TRUE(contains(shown, "... and 9980 more"));
}

TEST(Inspect, TextSaysWhatHappensToWhatIsMasked) {
  const json got = inspect(">a\nACGTacNN\n");
  EXPECT_TRUE(contains(render_inspection("x", got), "degenerate:  2 (25.00 %), masked from the loss"));
  EXPECT_TRUE(contains(render_inspection("x", got), "soft-masked: 2 (25.00 %), read as upper case"));
  DataConfig policies;
  policies.soft_masked = SoftMaskedPolicy::kWeight;
  policies.mask_degenerate_bases = false;
  EXPECT_TRUE(contains(render_inspection("x", got, policies), "loss weight 0.1"));
  EXPECT_TRUE(contains(render_inspection("x", got, policies), "learned"));
  const json lengthy =
      inspect(fmt::format(">{}\xc3\xa9yz\nAC\n>{}\n", std::string(99, 'x'), std::string(5000, 'w')));
  EXPECT_TRUE(contains(render_inspection("x", lengthy), fmt::format("{}...\n", std::string(99, 'x'))));
  EXPECT_LT(render_inspection("x", lengthy).size(), 1000u);
  const json empty = inspect(">a\n");
  EXPECT_TRUE(contains(render_inspection("x", empty), "x: 1 record, 0 bases"));
}

}  // namespace
}  // namespace biomoe
